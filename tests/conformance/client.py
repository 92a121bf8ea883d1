"""What a probe stands on: the official SDK, whichever version this interpreter has, pointed at a running server."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import httpx
import numpy as np
import tinker
from tinker import types

API_KEY = "tml-conformance"
EOS = 256
# The tokenizer of tests/tiny.py has a token a byte, in the order of the characters by which byte-level BPE shows bytes:
# those that print, then the others.
_PRINTS = [*range(33, 127), *range(161, 173), *range(174, 256)]
BYTE_OF = (*_PRINTS, *(byte for byte in range(256) if byte not in _PRINTS))

Probe = TypeVar("Probe", bound=Callable[..., None])


def version_of(text: str) -> tuple[int, ...]:
    """Example: version_of("0.16.1") == (0, 16, 1)"""
    return tuple(int(part) for part in text.split(".") if part.isdigit())


def since(version: str) -> Callable[[Probe], Probe]:
    """Marks a probe that needs this SDK version, because older ones lack what it calls."""

    def mark(probe: Probe) -> Probe:
        probe.__dict__["since"] = version_of(version)
        return probe

    return mark


def until(version: str) -> Callable[[Probe], Probe]:
    """Marks a probe of what the SDK had up to this version, included."""

    def mark(probe: Probe) -> Probe:
        probe.__dict__["until"] = version_of(version)
        return probe

    return mark


def with_torch(probe: Probe) -> Probe:
    """Marks a probe of what the SDK does by torch, on the client's side."""
    probe.__dict__["torch"] = True
    return probe


def applies(probe: Callable[..., None], version: tuple[int, ...], torch: bool) -> bool:
    """Whether the SDK of this version, with torch or without, can run the probe."""
    marks = probe.__dict__
    low, high = marks.get("since", (0,)), marks.get("until", (math.inf,))
    return low <= version and version[: len(high)] <= high and (torch or not marks.get("torch", False))


class Client:
    """One probe's view of the server. Sessions that it opens are finished by `close`, so that slots come free."""

    def __init__(self, url: str, base_model: str):
        self.url, self.base_model = url.rstrip("/"), base_model
        self.http = httpx.Client(base_url=self.url, headers={"X-API-Key": API_KEY}, timeout=60.0)
        self._sessions: set[str] = set()

    def close(self) -> None:
        for session_id in sorted(self._sessions):
            self.finish(session_id)
        self.http.close()

    def service(self, **options: Any) -> tinker.ServiceClient:
        """A session of its own."""
        return tinker.ServiceClient(base_url=self.url, api_key=API_KEY, **options)

    def trainer(self, service: tinker.ServiceClient | None = None, **options: Any) -> tinker.TrainingClient:
        """A fresh adapter, of rank 4 and seed 0 unless said otherwise."""
        options = {"rank": 4, "seed": 0, **options}
        trainer = (service or self.service()).create_lora_training_client(base_model=self.base_model, **options)
        return self.note(trainer)

    def note(self, trainer: tinker.TrainingClient) -> tinker.TrainingClient:
        """The trainer, once it is there; remembers whose session it is."""
        trainer = settled(trainer)
        self._sessions.add(session_of(trainer))
        return trainer

    def base_sampler(self) -> tinker.SamplingClient:
        return settled(self.service().create_sampling_client(base_model=self.base_model))

    def rest(self) -> Any:
        return self.service().create_rest_client()

    def finish(self, session_id: str) -> None:
        """Ends a session the way SDK 0.38 does; older ones let it expire."""
        reason = {"reason": {"type": "success"}, "detail": None}
        self.http.post(f"/api/v1/sessions/{session_id}/finish", json=reason).raise_for_status()
        self._sessions.discard(session_id)

    # Raw HTTP, for what no SDK would send.

    def post(self, path: str, /, **request: Any) -> httpx.Response:
        """POSTs JSON to /api/v1/..."""
        return self.http.post(f"/api/v1/{path}", json=request)

    def open_session(self) -> str:
        answer = self.post("create_session", tags=[], sdk_version="0.38.0", type="create_session")
        answer.raise_for_status()
        session_id = str(answer.json()["session_id"])
        self._sessions.add(session_id)
        return session_id

    def result(self, answer: httpx.Response, accept: str = "application/json") -> Any:
        """Polls the future that `answer` promised until it is done; its result, or the failure's dict."""
        answer.raise_for_status()
        request_id = answer.json()["request_id"]
        while True:
            done = self.http.post(
                "/api/v1/retrieve_future",
                json={"request_id": request_id, "allow_metadata_only": False},
                headers={"Accept": accept},
            )
            if done.status_code == 408:
                continue
            done.raise_for_status()
            if done.headers["content-type"].startswith("application/x-protobuf"):
                return done.content
            body = done.json()
            if body.get("type") != "try_again":
                return body

    def raw_model(self, session_id: str | None = None, seq: int = 0, rank: int = 4) -> str:
        """A model made by hand; its id."""
        session_id = session_id or self.open_session()
        answer = self.post(
            "create_model", session_id=session_id, model_seq_id=seq, base_model=self.base_model,
            lora_config={"rank": rank, "seed": 0}, type="create_model",
        )  # fmt: skip
        result = self.result(answer)
        assert "error" not in result, result
        return str(result["model_id"])


def settled(made: Any) -> Any:
    """A client: the newest SDKs make a future of one, older ones the client itself."""
    return made.result() if isinstance(made, tinker.APIFuture) else made


def session_of(trainer: tinker.TrainingClient) -> str:
    """The session of a model: `<session>:train:<seq>`."""
    return str(trainer.model_id).split(":train:")[0]


def tensor(values: Any, kind: str) -> types.TensorData:
    """`kind`: int64 or float32."""
    array = np.asarray(values, dtype=kind)
    return types.TensorData(data=array.flatten().tolist(), dtype=kind, shape=list(array.shape))  # type: ignore[arg-type]


def datum(tokens: Sequence[int], weights: Sequence[float] | None = None, **inputs: Any) -> types.Datum:
    """A next-token datum: inputs tokens[:-1], targets tokens[1:], weights 1 unless given; further inputs are f32."""
    if not inputs:
        inputs = {"weights": [1.0] * (len(tokens) - 1) if weights is None else weights}
    tensors = {name: tensor(values, "float32") for name, values in inputs.items()}
    tensors["target_tokens"] = tensor(list(tokens[1:]), "int64")
    return types.Datum(model_input=types.ModelInput.from_ints(list(tokens[:-1])), loss_fn_inputs=tensors)


def rl_datum(tokens: Sequence[int], logprobs: Sequence[float], advantages: Sequence[float]) -> types.Datum:
    return datum(tokens, logprobs=list(logprobs), advantages=list(advantages))


def words(*texts: str) -> list[list[int]]:
    """Each text as the tiny model's tokens."""
    return [[BYTE_OF.index(byte) for byte in text.encode()] for text in texts]


def is_ascii(token: int) -> bool:
    return token < EOS and 32 <= BYTE_OF[token] < 127


def spelled(tokens: Sequence[int]) -> str:
    """The text of ASCII tokens."""
    return bytes(BYTE_OF[token] for token in tokens).decode("ascii")


TEXTS = words("the quick brown fox", "jumps over the lazy", "dog and runs away!!", "0123456789 abcdefgh")


def values(output: Mapping[str, Any], name: str = "logprobs") -> np.ndarray:
    """A loss output as an array, in every SDK version."""
    tensor_data = output[name]
    array = np.asarray(tensor_data.data, dtype=np.float64)
    return array.reshape(tensor_data.shape) if tensor_data.shape is not None else array


def forward(trainer: tinker.TrainingClient, data: Sequence[types.Datum]) -> list[np.ndarray]:
    """Log-probs of each datum's targets."""
    result = trainer.forward(list(data), "cross_entropy").result()
    return [values(output) for output in result.loss_fn_outputs]


def fingerprint(trainer: tinker.TrainingClient) -> np.ndarray:
    """Log-probs of fixed texts: what the model is now, to the last bit."""
    return np.concatenate(forward(trainer, [datum(text) for text in TEXTS]))


def metric(result: Any, name: str) -> float:
    """A metric of an optim_step by its first part, whatever reduction it is labelled with."""
    for key, value in (result.metrics or {}).items():
        if key.split(":")[0] == name:
            return float(value)
    raise AssertionError(f"no metric {name} in {result.metrics}")


def grad_norm(trainer: tinker.TrainingClient, data: Sequence[types.Datum], loss: str = "cross_entropy") -> float:
    """The norm of this batch's gradient; weights stay (learning rate 0), accumulated gradients are gone after."""
    pending = trainer.forward_backward(list(data), loss)  # type: ignore[arg-type]
    step = trainer.optim_step(types.AdamParams(learning_rate=0.0))
    pending.result()
    return metric(step.result(), "grad_norm")


def train(
    trainer: tinker.TrainingClient, texts: Sequence[Sequence[int]] = TEXTS[:2], steps: int = 2, rate: float = 0.02
) -> None:
    """Teaches the texts by cross-entropy, all requests sent before the first is read."""
    data = [datum(text) for text in texts]
    pending: list[Any] = []
    for _ in range(steps):
        pending += [
            trainer.forward_backward(data, "cross_entropy"),
            trainer.optim_step(types.AdamParams(learning_rate=rate)),
        ]
    for future in pending:
        future.result()


def sample(sampler: tinker.SamplingClient, prompt: Sequence[int], num_samples: int = 1, **options: Any) -> Any:
    """The SDK's future of a sample; `options` are SamplingParams'."""
    params = types.SamplingParams(**{"max_tokens": 8, "stop": [], **options})
    return sampler.sample(
        prompt=types.ModelInput.from_ints(list(prompt)), num_samples=num_samples, sampling_params=params
    )


def scored(sampler: tinker.SamplingClient, tokens: Sequence[int]) -> list[float | None]:
    return list(sampler.compute_logprobs(types.ModelInput.from_ints(list(tokens))).result())


def snapshot(trainer: tinker.TrainingClient) -> tinker.SamplingClient:
    """An ephemeral sampler of the model as it is now."""
    return settled(trainer.save_weights_and_get_sampling_client())


@contextlib.contextmanager
def refused(*parts: str) -> Iterator[None]:
    """The block must raise one of the SDK's errors, whose text has these parts, and which isn't the server's fault."""
    try:
        yield
    except (tinker.TinkerError, ValueError) as error:
        text = str(error)
        assert not isinstance(error, tinker.InternalServerError | tinker.APIConnectionError), text
        missing = [part for part in parts if part.lower() not in text.lower()]
        assert not missing, f"the refusal lacks {missing}: {text}"
    else:
        raise AssertionError("nothing was refused")


def close_to(got: Any, want: Any, tolerance: float = 1e-4) -> None:
    """Equal within `tolerance`, relative above 1 and absolute below."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape, f"shape {got.shape}, expected {want.shape}"
    gap = np.abs(got - want) / np.maximum(1.0, np.abs(want))
    assert np.all(gap <= tolerance), f"off by {gap.max():.3g}: got {got.ravel()[:6]}, expected {want.ravel()[:6]}"


def equal(got: Any, want: Any) -> None:
    """Equal to the last bit."""
    got, want = np.asarray(got), np.asarray(want)
    assert np.array_equal(got, want), f"off by {np.max(np.abs(got - want)):.3g}"
