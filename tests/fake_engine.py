"""An engine process without a model: speaks `hosts/protocol.py`, answers at once and always the same.

In a thread of the test (`with FakeEngine(address) as engine:`) or as a process of its own, which can be killed:
`python tests/fake_engine.py ADDRESS`, with the connection key in LOCOJAX_ENGINE_AUTHKEY (hex; default "fake" as text).

What it computes is a function of its input and of the model's number of optimizer steps, so that a test can tell
old weights from new ones: `target_logprob`, `sampled_tokens`, `sampled_logprobs`.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import queue
import signal
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, Listener
from typing import Any

import numpy as np

from locojax.hosts import protocol as p
from locojax.types import Completion, ForwardBackwardResult, OptimStepResult

AUTHKEY = b"fake"
VOCAB = 32_768
SAMPLED_IDS = 509  # so many ids, from 3 up, are sampled: a small tokenizer can decode them
CONTEXT = 4096
EOS = 2


def target_logprob(targets: np.ndarray, steps: int) -> np.ndarray:
    """f32, like `targets`: what a model of so many optimizer steps gives each target."""
    return (-((targets * 31 + steps * 7) % 97 + 1) / 32).astype(np.float32)


def sampled_tokens(prompt: tuple[int, ...], seed: int, index: int, count: int) -> tuple[int, ...]:
    first = sum(prompt) * 17 + seed * 101 + index * 13
    return tuple(3 + (first + 7 * i) % SAMPLED_IDS for i in range(count))


def sampled_logprobs(tokens: tuple[int, ...], steps: int) -> np.ndarray:
    return target_logprob(np.asarray(tokens, np.int64), steps)


class _Model:
    def __init__(self, adapter: p.AdapterConfig, steps: int = 0):
        self.adapter, self.steps, self.num_accumulated = adapter, steps, 0

    def state(self) -> p.ModelState:
        return p.ModelState(self.adapter, 32.0, self.steps)


class FakeEngine:
    """Serves one front end at a time until `stop`, or `crash` (then what it held is gone, as with a killed process).

    Attributes:
      ran: every operation, in the order in which it was run.
      held: operation types that wait until `release`.
      sample_seconds: how long a sample takes; others run meanwhile.
      failures: text by operation type: fails it (category server, or user if the text begins with "user:").
    """

    def __init__(
        self, address: str, authkey: bytes = AUTHKEY, *, model_name: str = "test/tiny-model", max_adapters: int = 8,
        max_rank: int = 32, sample_seconds: float = 0.0, status_seconds: float = 0.05, start_seconds: float = 0.0,
    ):  # fmt: skip
        self.address, self.authkey, self.model_name = address, authkey, model_name
        self.max_adapters, self.max_rank = max_adapters, max_rank
        self.sample_seconds, self.status_seconds, self.start_seconds = sample_seconds, status_seconds, start_seconds
        self.incarnation = uuid.uuid4().hex
        self.ran: list[tuple[str, p.Operation]] = []
        self.held: set[type] = set()
        self.failures: dict[type, str] = {}
        self.models: dict[str, _Model] = {}
        self.samplers: dict[str, int] = {}  # by id, the optimizer steps of its weights
        self.answers: dict[str, p.Finished | p.Failed] = {}
        self.num_resent = 0
        self._queued: list[p.Submit] = []
        self._sampling: list[tuple[float, p.Submit]] = []
        self._connection: Connection | None = None
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._stopping = threading.Event()
        pathlib.Path(address).unlink(missing_ok=True)
        self._listener = Listener(address, "AF_UNIX", authkey=authkey)
        self._threads = [
            threading.Thread(target=target, name=f"fake-{target.__name__}", daemon=True)
            for target in (self._accept, self._run)
        ]

    def start(self) -> FakeEngine:
        for thread in self._threads:
            thread.start()
        return self

    def stop(self) -> None:
        self._stopping.set()
        self.drop_connection()
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as waking:  # the thread that accepts
            waking.connect(self.address)
        for thread in self._threads:
            thread.join(5)
        self._listener.close()

    crash = stop

    def __enter__(self) -> FakeEngine:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def release(self, *kinds: type) -> None:
        """Lets what was held run: these types, or all."""
        self.held.difference_update(kinds or set(self.held))

    def drop_connection(self) -> None:
        """As if the front end's process had died: the engine lives on."""
        connection = self._connection
        if connection is None:
            return
        try:
            with socket.socket(fileno=os.dup(connection.fileno())) as half:
                half.shutdown(socket.SHUT_RDWR)
        except (OSError, ValueError):
            return  # it was closed already

    def ran_of(self, kind: type) -> list[Any]:
        """The operations of one type that were run, in order."""
        return [operation for _, operation in self.ran if isinstance(operation, kind)]

    # The threads: one receives, one runs.

    def _accept(self) -> None:
        time.sleep(self.start_seconds)
        while not self._stopping.is_set():
            try:
                connection = self._listener.accept()
            except (OSError, EOFError, AuthenticationError):
                continue
            if self._stopping.is_set():
                connection.close()
                return
            self._inbox.put(connection)
            try:
                while not self._stopping.is_set():
                    if connection.poll(0.05):
                        self._inbox.put(connection.recv())
            except (OSError, EOFError):
                pass
            connection.close()

    def _run(self) -> None:
        next_status = 0.0
        while not self._stopping.is_set():
            try:
                self._take(self._inbox.get(timeout=0.005))
                while True:
                    self._take(self._inbox.get_nowait())
            except queue.Empty:
                pass
            waiting, self._queued = self._queued, []
            blocked: set[str] = set()
            for submit in waiting:
                self._consider(submit, blocked)
            for entry in [entry for entry in self._sampling if entry[0] <= time.monotonic()]:
                self._sampling.remove(entry)
                self._execute(entry[1])
            if time.monotonic() >= next_status:
                next_status = time.monotonic() + self.status_seconds
                self._send(self._status())

    def _consider(self, submit: p.Submit, blocked: set[str]) -> None:
        """Runs it, unless it is held, or a held one of the same model is before it."""
        model_id = getattr(submit.operation, "model_id", None)
        if type(submit.operation) in self.held or model_id in blocked:
            self._queued.append(submit)
            if model_id is not None:
                blocked.add(model_id)
        elif isinstance(submit.operation, p.Sample) and self.sample_seconds:
            self._sampling.append((time.monotonic() + self.sample_seconds, submit))
        else:
            self._execute(submit)

    def _take(self, message: Any) -> None:
        if isinstance(message, Connection):
            self._connection = message
            self._send(p.Progress("loading nothing", 0.0))
            self._send(self._info())
            for answer in self.answers.values():
                self.num_resent += 1
                self._send(answer)
        elif isinstance(message, p.Submit):
            self._queued.append(message)
        elif isinstance(message, p.Acknowledge):
            for operation_id in message.operation_ids:
                self.answers.pop(operation_id, None)
        elif isinstance(message, p.Cancel):
            self._cancel(message.operation_id)
        elif isinstance(message, p.Shutdown):
            self._stopping.set()

    def _cancel(self, operation_id: str) -> None:
        for submit in [one for one in self._queued if one.operation_id == operation_id]:
            self._queued.remove(submit)
            self._answer(p.Failed(operation_id, "user", "Cancelled."))
        for entry in [entry for entry in self._sampling if entry[1].operation_id == operation_id]:
            self._sampling.remove(entry)
            self._execute(entry[1], aborted=True)

    def _info(self) -> p.EngineInfo:
        running = tuple(one.operation_id for one in [*self._queued, *(entry[1] for entry in self._sampling)])
        limits = (VOCAB, CONTEXT, CONTEXT, self.max_adapters, self.max_rank, (EOS,))
        held = (tuple(self.models), tuple(self.samplers), running)
        return p.EngineInfo(self.incarnation, self.model_name, "fake", *limits, *held)

    def _status(self) -> p.EngineStatus:
        queues: dict[str, int] = {}
        for submit in self._queued:
            model_id = getattr(submit.operation, "model_id", None)
            if model_id:
                queues[model_id] = queues.get(model_id, 0) + 1
        gauges = {
            "num_running_samples": len(self._sampling), "num_waiting_samples": 0, "num_models": len(self.models),
            "num_samplers": len(self.samplers), "num_queued_operations": len(self._queued),
        }  # fmt: skip
        totals = {"sampled_tokens": 0, "trained_tokens": 0, "optimizer_steps": len(self.ran_of(p.OptimStep))}
        return p.EngineStatus(gauges, totals, {"idle": 1.0, "train": 0.5}, queues)

    def _send(self, message: p.FromEngine) -> None:
        connection = self._connection
        if connection is not None:
            try:
                connection.send(message)
            except (OSError, ValueError):
                return

    def _answer(self, answer: p.Finished | p.Failed) -> None:
        self.answers[answer.operation_id] = answer
        self._send(answer)

    # What operations do.

    def _execute(self, submit: p.Submit, *, aborted: bool = False) -> None:
        operation = submit.operation
        self.ran.append((submit.operation_id, operation))
        if (text := self.failures.get(type(operation))) is not None:
            category: p.Category = "user" if text.startswith("user:") else "server"
            self._answer(p.Failed(submit.operation_id, category, text.removeprefix("user:").strip()))
            return
        try:
            result = self._handlers()[type(operation)](operation)
        except ValueError as error:
            self._answer(p.Failed(submit.operation_id, "user", str(error)))
            return
        if isinstance(operation, p.Sample) and operation.stream:
            for completion in result.completions:
                for tokens in self._stream(submit.operation_id, completion):
                    self._send(tokens)
        self._answer(p.Finished(submit.operation_id, result))

    def _handlers(self) -> dict[type, Callable[[Any], p.Result]]:
        return {
            p.CreateModel: self._create, p.RestoreModel: self._restore, p.LoadWeights: self._load,
            p.RemoveModel: self._remove, p.ForwardBackward: self._forward_backward, p.OptimStep: self._optim_step,
            p.SaveState: self._save_state, p.SaveAdapter: self._save_adapter, p.OpenSampler: self._open,
            p.CloseSampler: self._close, p.Sample: self._sample,
        }  # fmt: skip

    def _model(self, model_id: str) -> _Model:
        if model_id not in self.models:
            raise ValueError(f"No model {model_id!r} in the engine.")
        return self.models[model_id]

    def _add(self, model_id: str, model: _Model) -> p.ModelState:
        if len(self.models) >= self.max_adapters:
            raise ValueError(f"All {self.max_adapters} adapter slots are taken.")
        if model.adapter.rank > self.max_rank:
            raise ValueError(f"Rank {model.adapter.rank} is above the engine's most, {self.max_rank}.")
        self.models[model_id] = model
        return model.state()

    def _create(self, operation: p.CreateModel) -> p.ModelState:
        return self._add(operation.model_id, _Model(operation.adapter))

    def _restore(self, operation: p.RestoreModel) -> p.ModelState:
        return self._add(operation.model_id, self._read(operation.directory, operation.optimizer))

    def _load(self, operation: p.LoadWeights) -> p.ModelState:
        self._model(operation.model_id)
        self.models[operation.model_id] = self._read(operation.directory, operation.optimizer)
        return self.models[operation.model_id].state()

    def _read(self, directory: str, optimizer: bool) -> _Model:
        path = pathlib.Path(directory, "fake.json")
        if not path.exists():
            raise ValueError(f"No checkpoint in {directory}.")
        saved = json.loads(path.read_text())
        if optimizer and saved["peft"]:
            raise ValueError("This is a sampler checkpoint.")
        return _Model(p.AdapterConfig(**saved["adapter"]), saved["steps"])

    def _remove(self, operation: p.RemoveModel) -> None:
        self._model(operation.model_id)
        del self.models[operation.model_id]

    def _forward_backward(self, operation: p.ForwardBackward) -> ForwardBackwardResult:
        model = self._model(operation.model_id)
        outputs, total = [], 0.0
        for datum in operation.data:
            targets = np.asarray(datum.inputs["target_tokens"])
            logprobs = target_logprob(targets, model.steps)
            weights = np.asarray(datum.inputs.get("weights", datum.inputs.get("advantages", np.ones_like(logprobs))))
            losses = (-weights * logprobs).astype(np.float32)
            outputs.append({"logprobs": logprobs, "elementwise_loss": losses})
            total += float(losses.sum())
        model.num_accumulated += operation.gradient
        return ForwardBackwardResult(tuple(outputs), {"loss:sum": total})

    def _optim_step(self, operation: p.OptimStep) -> OptimStepResult:
        model = self._model(operation.model_id)
        applied = model.num_accumulated > 0
        metrics = {"grad_norm": float(model.num_accumulated), "learning_rate": operation.adam.learning_rate}
        model.steps += applied
        model.num_accumulated = 0
        return OptimStepResult(applied, model.steps, metrics, None if applied else "nothing was accumulated")

    def _save_state(self, operation: p.SaveState) -> p.Saved:
        return self._write(operation.model_id, operation.directory, peft=False)

    def _save_adapter(self, operation: p.SaveAdapter) -> p.Saved:
        return self._write(operation.model_id, operation.directory, peft=True)

    def _write(self, model_id: str, directory: str, *, peft: bool) -> p.Saved:
        model = self._model(model_id)
        path = pathlib.Path(directory)
        path.mkdir(parents=True)
        a = model.adapter
        adapter = {name: getattr(a, name) for name in ("rank", "seed", "attention", "mlp", "unembed")}
        files = {"fake.json": json.dumps({"adapter": adapter, "steps": model.steps, "peft": peft})}
        if peft:
            files["adapter_config.json"] = json.dumps({"peft_type": "LORA", "r": a.rank, "lora_alpha": 32})
            files["adapter_model.safetensors"] = "weights of step " + str(model.steps)
        for name, text in files.items():
            (path / name).write_text(text)
        return p.Saved(sum(file.stat().st_size for file in path.iterdir()))

    def _open(self, operation: p.OpenSampler) -> None:
        steps = 0
        if operation.model_id is not None:
            steps = self._model(operation.model_id).steps
        elif operation.directory is not None:
            steps = self._read(operation.directory, False).steps
        self.samplers[operation.sampler_id] = steps

    def _close(self, operation: p.CloseSampler) -> None:
        self.samplers.pop(operation.sampler_id, None)

    def _sample(self, operation: p.Sample) -> p.Sampled:
        if operation.sampler_id not in self.samplers:
            raise ValueError(f"No sampler {operation.sampler_id!r} in the engine.")
        steps = self.samplers[operation.sampler_id]
        count = operation.params.max_tokens or 16
        completions = []
        for index in range(operation.num_samples):
            tokens = sampled_tokens(operation.prompt, operation.params.seed or 0, index, count)
            text = "".join(chr(97 + token % 26) for token in tokens)
            logprobs = sampled_logprobs(tokens, steps)
            completions.append(Completion(index, tokens, logprobs, text, "length", None, steps, "tempered"))
        return p.Sampled(tuple(completions), **self._of_prompt(operation, steps, completions))

    def _of_prompt(self, operation: p.Sample, steps: int, completions: list[Completion]) -> dict[str, Any]:
        length = len(operation.prompt)
        found: dict[str, Any] = {"num_cached_prompt_tokens": 0}
        if operation.prompt_logprobs:
            logprobs = target_logprob(np.asarray(operation.prompt, np.int64), steps)
            logprobs[0] = np.nan
            found["prompt_logprobs"] = logprobs
        if (k := operation.topk_prompt_logprobs) > 0:
            found["topk_prompt_logprobs"] = _topk(length, k, masked=True)
        if (k := operation.topk_sample_logprobs) > 0:
            found["topk_sample_logprobs"] = tuple(_topk(len(one.tokens), k, masked=False) for one in completions)
        if operation.target_prompt_logprobs is not None:
            targets = operation.target_prompt_logprobs
            found["target_prompt_logprobs"] = np.where(targets < 0, 0, target_logprob(targets, steps)).astype(
                np.float32
            )
        if (k := operation.prompt_alt_tokens) > 0:
            found["prompt_alt_tokens"] = _topk(length, k, masked=True)
        return found

    def _stream(self, operation_id: str, completion: Completion) -> Iterator[p.Tokens]:
        last = len(completion.tokens) - 1
        for i, token in enumerate(completion.tokens):
            logprobs = completion.logprobs[i : i + 1]
            yield p.Tokens(operation_id, completion.sample_index, (token,), logprobs, completion.text[i], i == last)


def _topk(length: int, k: int, *, masked: bool) -> tuple[np.ndarray, np.ndarray]:
    ids = np.tile(np.arange(k, dtype=np.int32), (length, 1))
    logprobs = np.tile(-np.arange(1, k + 1, dtype=np.float32), (length, 1))
    if masked and length:
        ids[0], logprobs[0] = 0, -99999.0
    return ids, logprobs


def main(address: str) -> None:
    key = os.environ.get("LOCOJAX_ENGINE_AUTHKEY")
    FakeEngine(address, bytes.fromhex(key) if key else AUTHKEY).start()
    signal.sigwait({signal.SIGTERM, signal.SIGINT})


if __name__ == "__main__":
    main(sys.argv[1])
