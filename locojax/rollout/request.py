"""A request as the engine runs it: validated, its stop rules resolved, one `Sample` for each completion.

No jax here.
"""

from __future__ import annotations

import codecs
import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn, Protocol, runtime_checkable

import numpy as np

from locojax.errors import RequestError
from locojax.rollout.pages import PromptBlock, SlotBlock
from locojax.rollout.stats import TokenEvent
from locojax.types import Completion, LogprobsOf, SampleRequest, StopReason

MAX_ALTERNATIVES = 1024
"""Most tokens reported, scored or drawn at one position."""
MAX_SAMPLES = 65536


@runtime_checkable
class TokenBytes(Protocol):
    """What the engine needs of a tokenizer: the exact bytes of a token, and which tokens end a completion."""

    eos_ids: tuple[int, ...]

    def token_bytes(self, id: int) -> bytes:
        """The bytes that the token adds to a text; empty for one that adds none."""


@dataclasses.dataclass(frozen=True)
class StopRule:
    """What ends a completion besides its length. Example: StopRule(ids=(2,), strings=(b"\\n\\nUser:",))"""

    ids: tuple[int, ...]
    strings: tuple[bytes, ...]

    @classmethod
    def of(cls, stop: str | Sequence[str] | Sequence[int] | None, eos_ids: Iterable[int]) -> StopRule:
        """None: EOS stops. Empty: nothing does. Else what is listed does, and EOS still does: beyond it is noise."""
        if stop is None:
            return cls(tuple(eos_ids), ())
        given: tuple[str | int, ...] = (stop,) if isinstance(stop, str) else tuple(stop)
        if not given:
            return cls((), ())
        ids = [item for item in given if not isinstance(item, str)]
        strings = [item.encode() for item in given if isinstance(item, str)]
        return cls(tuple(dict.fromkeys([*ids, *eos_ids])), tuple(dict.fromkeys(strings)))


def end_of_match(text: bytes, start: int, strings: Sequence[bytes]) -> tuple[int, bytes] | None:
    """(end, string) of the match that completes first, among those completed at or after `start`; None if none is.

    On equal ends the one given first is named. `text[:start]` has been searched before.
    """
    best: tuple[int, bytes] | None = None
    for string in strings:
        found = text.find(string, max(0, start - len(string) + 1))
        if found >= 0 and (best is None or found + len(string) < best[0]):
            best = found + len(string), string
    return best


@dataclasses.dataclass(frozen=True)
class Begun:
    """What has been sampled of a completion that isn't finished, by the weights of `policy_version`.

    Example: Begun((12, 7), (-0.5, -1.25), policy_version=3)
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    policy_version: int


@dataclasses.dataclass(frozen=True)
class Gained:
    """Tokens `start`.. of a running sample. `begun.policy_version`: of its first token."""

    request_id: str
    sample_index: int
    start: int
    begun: Begun


@dataclasses.dataclass(eq=False)
class Sample:
    """One completion on its way. Created by `Engine.add`; slot and prompt are the scheduler's, tokens the engine's.

    `context` is what its prompt block holds: the prompt and, after a preemption, the tokens sampled before it. The rest
    of `tokens` lives in the slot, the last one not yet stored: it is the next forward pass's input.
    """

    request: SampleRequest
    index: int
    key: np.ndarray  # u32[2]
    stop: StopRule
    max_tokens: int
    context: tuple[int, ...]
    streamed: bool = False
    tokens: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    top: list[tuple[np.ndarray, np.ndarray]] = dataclasses.field(default_factory=list)  # ids, log-probs [k] a token
    text: bytearray = dataclasses.field(default_factory=bytearray)
    policy_version: int | None = None  # the weights' that its first token came from
    prompt: PromptBlock | None = None
    slot: SlotBlock | None = None
    num_cached: int = 0  # prompt tokens that had been computed when it was admitted
    told: int = 0  # tokens that `gained` has given
    stop_reason: StopReason | None = None
    stopped_by: int | str | None = None
    _utf8: codecs.IncrementalDecoder = dataclasses.field(
        default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace")
    )

    @property
    def watched(self) -> bool:
        """The host wants to look at its tokens often."""
        return self.streamed or bool(self.stop.strings)

    @property
    def remaining(self) -> int:
        return self.max_tokens - len(self.tokens)

    @property
    def num_own(self) -> int:
        """Tokens sampled since the slot was opened."""
        return len(self.request.prompt) + len(self.tokens) - len(self.context)

    @property
    def num_stored(self) -> int:
        """Of those, how many have their keys and values in the slot."""
        return max(self.num_own - 1, 0)

    @property
    def fresh(self) -> bool:
        """Its next token comes from the prompt block's last hidden state, without a forward pass."""
        return self.num_own == 0

    @property
    def prefix_key(self) -> tuple[int, tuple[int, ...]]:
        return self.request.adapter, self.context

    def preempted(self) -> None:
        """Folds what the slot held into the context, to be prefilled again."""
        self.context = (*self.request.prompt, *self.tokens)

    def begin(self, begun: Begun, vocabulary: TokenBytes) -> None:
        """Goes on from what was sampled of it elsewhere; comes before anything else."""
        self.append(begun.tokens, begun.logprobs, vocabulary)
        self.policy_version, self.told = begun.policy_version, len(self.tokens)
        self.preempted()

    def gained(self) -> Gained | None:
        """What it has sampled since the last call; None: nothing."""
        start, self.told = self.told, len(self.tokens)
        if start == self.told or self.policy_version is None:
            return None
        new = Begun(tuple(self.tokens[start:]), tuple(self.logprobs[start:]), self.policy_version)
        return Gained(self.request.request_id, self.index, start, new)

    def append(self, tokens: Sequence[int], logprobs: Sequence[float], vocabulary: TokenBytes) -> int:
        """Takes sampled tokens up to the one that ends the sample; returns how many were taken."""
        if self.stop_reason is not None:
            return 0
        taken = 0
        for token, logprob in zip(tokens, logprobs, strict=True):
            searched = len(self.text)
            self.tokens.append(token)
            self.logprobs.append(logprob)
            self.text += vocabulary.token_bytes(token)
            taken += 1
            match = end_of_match(bytes(self.text), searched, self.stop.strings) if self.stop.strings else None
            if token in self.stop.ids:
                self.stop_reason, self.stopped_by = "stop", token
            elif match is not None:
                self.stop_reason, self.stopped_by = "stop", match[1].decode()
            elif len(self.tokens) >= self.max_tokens:
                self.stop_reason = "length"
            if self.stop_reason is not None:
                break
        return taken

    def likeliest(self) -> tuple[np.ndarray, np.ndarray]:
        """ids i32[N, k] and log-probs f32[N, k] of the likeliest tokens at each of its N tokens."""
        k, kept = self.request.topk_sample_logprobs, self.top[: len(self.tokens)]
        ids, logprobs = np.zeros((len(kept), k), np.int32), np.zeros((len(kept), k), np.float32)
        for i, (of_ids, of_logprobs) in enumerate(kept):
            ids[i], logprobs[i] = of_ids, of_logprobs
        return ids, logprobs

    def event(self, num_tokens: int, text_start: int) -> TokenEvent:
        """Its last `num_tokens` tokens, whose bytes begin at `text_start`, for a stream."""
        data = bytes(self.text[text_start:])
        return TokenEvent(
            self.request.request_id,
            self.index,
            tuple(self.tokens[-num_tokens:]),
            tuple(self.logprobs[-num_tokens:]),
            data,
            self._utf8.decode(data, final=self.stop_reason is not None),
            self.stop_reason is not None,
        )

    def completion(self, policy_version: int, logprobs_of: LogprobsOf) -> Completion:
        return Completion(
            sample_index=self.index,
            tokens=tuple(self.tokens),
            logprobs=np.asarray(self.logprobs, np.float32),
            text=self.text.decode("utf-8", errors="replace"),
            stop_reason=self.stop_reason or "abort",
            stopped_by=self.stopped_by,
            policy_version=policy_version if self.policy_version is None else self.policy_version,
            logprobs_of=logprobs_of,
        )


def validate(request: SampleRequest, *, vocab_size: int, max_context: int, num_adapters: int) -> int:
    """Refuses a malformed request; returns the most tokens a sample of it may have.

    Raises:
      RequestError: naming the request, the value, and what would be right.
    """
    who = f"Request {request.request_id!r}"
    params, prompt = request.params, request.prompt

    def check(right: bool, what: str, got: Any, expected: str) -> None:
        if not right:
            raise RequestError(f"{who}: {what}", got=got, expected=expected)

    check(len(prompt) > 0, "the prompt is empty", "0 tokens", "at least 1 token")
    bad = next((t for t in prompt if not 0 <= t < vocab_size), None)
    check(bad is None, "the prompt has a token outside of the vocabulary", bad, f"ids in [0, {vocab_size})")
    if len(prompt) >= max_context:
        raise RequestError(
            f"{who}: a prompt of {len(prompt)} tokens leaves no room in a context of {max_context}",
            expected=f"at most {max_context - 1} prompt tokens",
            remedy="Shorten or drop the prompt",
        )
    check(1 <= request.num_samples <= MAX_SAMPLES, "num_samples is out of range", request.num_samples,
          f"1 to {MAX_SAMPLES}")  # fmt: skip
    check(params.max_tokens is None or params.max_tokens >= 1, "max_tokens is out of range", params.max_tokens,
          "at least 1, or none for the rest of the context")  # fmt: skip
    check(0.0 <= params.temperature < float("inf"), "temperature is out of range", params.temperature, "0 or more")
    check(params.top_k >= -1, "top_k is out of range", params.top_k, "at least 1, or -1 for no limit")
    check(0.0 < params.top_p <= 1.0, "top_p is out of range", params.top_p, "above 0, at most 1")
    check(0.0 <= params.min_p < 1.0, "min_p is out of range", params.min_p, "0 or more, below 1")
    check(0 <= request.adapter < max(num_adapters, 1), "no such adapter is loaded", request.adapter,
          f"0 (none) to {max(num_adapters - 1, 0)}")  # fmt: skip
    most = min(MAX_ALTERNATIVES, vocab_size)
    for name in ("topk_prompt_logprobs", "topk_sample_logprobs", "prompt_alt_tokens"):
        asked = getattr(request, name)
        check(0 <= asked <= most, f"{name} is out of range", asked, f"0 to {most}")
    last_n = request.prompt_logprobs_last_n
    check(last_n is None or last_n >= 0, "prompt_logprobs_last_n is out of range", last_n, "0 or more, or none for all")
    targets = request.target_prompt_logprobs
    if targets is not None:
        right = targets.ndim == 2 and targets.shape[0] == len(prompt) - 1 and 1 <= targets.shape[1] <= most
        check(right, "target_prompt_logprobs has the wrong shape", list(targets.shape),
              f"[{len(prompt) - 1}, 1 to {most}], a row for each prompt token but the first")  # fmt: skip
        wrong = targets[(targets < -1) | (targets >= vocab_size)]
        check(not wrong.size, "target_prompt_logprobs has a token outside of the vocabulary", wrong[:1].tolist(),
              f"ids in [0, {vocab_size}), or -1 for none")  # fmt: skip
    stop = params.stop
    if isinstance(stop, str):
        stop = (stop,)
    for item in stop or ():
        right = bool(item) if isinstance(item, str) else isinstance(item, int) and 0 <= item < vocab_size
        check(right, "a stop is malformed", repr(item), f"non-empty strings, or token ids in [0, {vocab_size})")
    room = max_context - len(prompt)
    return room if params.max_tokens is None else min(params.max_tokens, room)


def refuse_size(request: SampleRequest, max_tokens: int, kv_bytes: int) -> NoReturn:
    """Raises RequestError: the request doesn't fit in an engine's memory of so many bytes, even alone."""
    raise RequestError(
        f"Request {request.request_id!r}: {len(request.prompt)} prompt tokens and up to {max_tokens} new ones"
        " don't fit in the KV memory",
        got=f"kv_bytes={kv_bytes}",
        remedy="Lower max_tokens or raise the engine's kv_bytes",
    )
