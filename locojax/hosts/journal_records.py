"""What a journal holds, record by record, and their form in bytes. No jax.

A payload is one line of JSON (`kind` and the record's fields), a newline, and for `Sampled` and `Decoded` their arrays'
bytes.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import zlib
from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np

from locojax.errors import CheckpointError
from locojax.types import Completion, Prompt, Reward


@dataclasses.dataclass(frozen=True)
class Started:
    """A process of the run began. `run` counts the run's starts, from 1: all hosts of one start have the same.

    Attributes:
      next_step: the step that it goes on from; what earlier starts trained from there on is void.
      num_prompts, prompts_per_step, period: of `BatchOrder`.
      settings: those that decide what is sampled and learnt: see `journal_resume.deciding`.
    """

    run: int
    rank: int
    num_hosts: int
    next_step: int
    num_prompts: int
    prompts_per_step: int
    period: int | None
    settings: Mapping[str, str]


@dataclasses.dataclass(frozen=True)
class Drawn:
    """A host took its prompts of a step. `places`: theirs in the batch of all hosts."""

    step: int
    places: tuple[int, ...]
    prompt_ids: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Admitted:
    """A host begins to sample prompts of a step, by weights of `version`; `prompts`: their fingerprints.

    What it had of them under other weights, or of other prompts at those places, is void.
    """

    step: int
    version: int
    places: tuple[int, ...]
    prompts: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Piece:
    """Tokens `start`.. of one completion that is still being sampled."""

    place: int
    sample: int
    start: int
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class Decoded:
    """What the samples that run have gained by one call of the engine."""

    step: int
    pieces: tuple[Piece, ...]


@dataclasses.dataclass(frozen=True)
class Sampled:
    """A prompt's completions are all there, `seconds` after the step's first admission. `prompt`: its fingerprint."""

    step: int
    place: int
    prompt_id: str
    prompt: str
    seconds: float
    completions: tuple[Completion, ...]


@dataclasses.dataclass(frozen=True)
class Graded:
    """One completion has its grade. `of`: see `completion_mark`."""

    step: int
    place: int
    sample: int
    of: int
    reward: Reward


@dataclasses.dataclass(frozen=True)
class Trained:
    """A step's batch went into the weights; places and prompts are this host's.

    `skipped`: why the update was not applied; the versions are then equal.
    """

    step: int
    version_before: int
    version_after: int
    places: tuple[int, ...]
    prompt_ids: tuple[str, ...]
    skipped: str | None


@dataclasses.dataclass(frozen=True)
class Published:
    """The sampler has these weights."""

    version: int


@dataclasses.dataclass(frozen=True)
class Evaluated:
    """Held-out accuracy of all hosts, after step `step`; -1: before the first. None: nothing could be scored."""

    step: int
    accuracy: float | None


@dataclasses.dataclass(frozen=True)
class Saved:
    """A checkpoint was begun, of the weights before step `next_step`."""

    next_step: int


Record: TypeAlias = (
    Started | Drawn | Admitted | Decoded | Sampled | Graded | Trained | Published | Evaluated | Saved
)

_COMPACT = json.JSONEncoder(separators=(",", ":"))  # json.dumps would make one for each record
_PLAIN: Mapping[str, Any] = {
    kind.__name__: kind for kind in (Started, Drawn, Admitted, Trained, Published, Evaluated, Saved)
}


def fingerprint(prompt: Prompt) -> str:
    """Tells whether a prompt is still the one that was sampled and graded: of its tokens, answer and meta."""
    fields = repr((prompt.tokens, prompt.answer, sorted(prompt.meta.items(), key=lambda item: str(item[0]))))
    return hashlib.blake2b(fields.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def completion_mark(completion: Completion) -> int:
    """Ties a grade to the very tokens that were graded."""
    return zlib.crc32(np.asarray(completion.tokens, np.int32).tobytes())


def encode(record: Record) -> bytes:
    """A record's payload."""
    fields: dict[str, Any] = {"kind": type(record).__name__}
    arrays = b""
    if isinstance(record, Sampled):
        fields |= {name: value for name, value in vars(record).items() if name != "completions"}
        fields["completions"] = [
            {**{name: value for name, value in vars(each).items() if name not in ("tokens", "logprobs")},
             "num_tokens": len(each.tokens)}
            for each in record.completions
        ]  # fmt: skip
        for each in record.completions:
            arrays += np.asarray(each.tokens, np.int32).tobytes() + np.asarray(each.logprobs, np.float32).tobytes()
    elif isinstance(record, Decoded):
        fields["step"] = record.step
        fields["pieces"] = [(each.place, each.sample, each.start, len(each.tokens)) for each in record.pieces]
        tokens = [token for each in record.pieces for token in each.tokens]
        logprobs = [logprob for each in record.pieces for logprob in each.logprobs]
        arrays = np.asarray(tokens, np.int32).tobytes() + np.asarray(logprobs, np.float32).tobytes()
    elif isinstance(record, Graded):
        if record.reward.error is None and record.reward.value is not None:
            return _score(record, record.reward.value)
        fields |= {**vars(record), "reward": (record.reward.value, record.reward.error)}
    else:
        fields |= vars(record)
    return _COMPACT.encode(fields).encode() + b"\n" + arrays


def _score(record: Graded, value: float) -> bytes:
    """The commonest record, as the encoder gives it, in a quarter of the time."""
    if not math.isfinite(value):
        return _COMPACT.encode({"kind": "Graded", **vars(record), "reward": (value, None)}).encode() + b"\n"
    numbers = f'"step":{record.step},"place":{record.place},"sample":{record.sample},"of":{record.of}'
    return f'{{"kind":"Graded",{numbers},"reward":[{float(value)!r},null]}}\n'.encode()


def decode(payload: bytes) -> Record:
    """What `encode` wrote.

    Raises:
      CheckpointError: it is of another version of this program.
    """
    line, _, arrays = payload.partition(b"\n")
    try:
        fields: dict[str, Any] = json.loads(line)
        kind = fields.pop("kind")
        if kind == "Sampled":
            return Sampled(**{**fields, "completions": _completions(fields["completions"], arrays)})
        if kind == "Decoded":
            return Decoded(fields["step"], _pieces(fields["pieces"], arrays))
        if kind == "Graded":
            return Graded(**{**fields, "reward": Reward(*fields["reward"])})
        return _PLAIN[kind](**{name: tuple(v) if isinstance(v, list) else v for name, v in fields.items()})
    except (ValueError, TypeError, KeyError) as error:
        raise CheckpointError(
            f"A whole record of the journal can't be understood: {type(error).__name__} {error}",
            remedy="Resume with the version of LoCoJAX that wrote it, or set run.journal=off to go on from the "
            "checkpoint alone",
        ) from error


def _pieces(rows: list[tuple[int, int, int, int]], arrays: bytes) -> tuple[Piece, ...]:
    total, found, at = sum(row[3] for row in rows), [], 0
    tokens = np.frombuffer(arrays, np.int32, total).tolist()
    logprobs = np.frombuffer(arrays, np.float32, total, 4 * total).tolist()
    for place, sample, start, num in rows:
        found.append(Piece(place, sample, start, tuple(tokens[at : at + num]), tuple(logprobs[at : at + num])))
        at += num
    return tuple(found)


def _completions(rows: list[dict[str, Any]], arrays: bytes) -> tuple[Completion, ...]:
    found, at = [], 0
    for row in rows:
        num = row.pop("num_tokens")
        tokens = np.frombuffer(arrays, np.int32, num, at)
        logprobs = np.frombuffer(arrays, np.float32, num, at + 4 * num)
        at += 8 * num
        found.append(Completion(tokens=tuple(tokens.tolist()), logprobs=logprobs, **row))
    return tuple(found)
