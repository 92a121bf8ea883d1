"""Completions that were being sampled when a run was lost, put together from the pieces in its journal. No jax."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from locojax.hosts.journal_records import Admitted, Decoded, Record
from locojax.rollout.request import Begun


@dataclasses.dataclass
class Unfinished:
    """A group of which one host's file holds pieces. `prompt`: its fingerprint. `samples`: by index, what there is."""

    prompt: str
    version: int
    samples: dict[int, Begun] = dataclasses.field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        return sum(len(begun.tokens) for begun in self.samples.values())


def unfinished(files: Iterable[Sequence[Record]]) -> dict[int, list[Unfinished]]:
    """Of one step's files, each host's one, by place: the groups that were begun. Those that were finished too."""
    found: dict[int, list[Unfinished]] = {}
    for records in files:
        for place, group in _of_file(records).items():
            if group.samples:
                found.setdefault(place, []).append(group)
    return found


def _of_file(records: Sequence[Record]) -> dict[int, Unfinished]:
    groups: dict[int, Unfinished] = {}
    for record in records:
        if isinstance(record, Admitted):
            for place, prompt in zip(record.places, record.prompts, strict=True):
                group = groups.get(place)
                if group is None or (group.prompt, group.version) != (prompt, record.version):
                    groups[place] = Unfinished(prompt, record.version)
        elif isinstance(record, Decoded):
            for piece in record.pieces:
                group = groups[piece.place]
                old = group.samples.get(piece.sample, Begun((), (), group.version))
                if piece.start > len(old.tokens):
                    continue  # what it goes on from stands in another host's file
                tokens = old.tokens[: piece.start] + piece.tokens
                logprobs = old.logprobs[: piece.start] + piece.logprobs
                group.samples[piece.sample] = Begun(tokens, logprobs, group.version)
    return groups
