"""What was sampled, remembered for `stable_reinforce`: its importance ratios are against the server's own record.

A client says, for each run of a datum's targets, of which sequence it is. The record then fills in `logprobs` (fp32, as
the sampler drew them; 0 on prompts) and `weights` (1 on sampled tokens, 0 elsewhere).
"""

from __future__ import annotations

import collections
import dataclasses
import time
from typing import Any

import numpy as np
import sqlalchemy as sa

from locojax.hosts.protocol import Sampled
from locojax.server.service_errors import ServiceError
from locojax.server.service_settings import ServiceSettings
from locojax.server.store import Store, row, select
from locojax.server.store_tables import SEQUENCES, Sequence
from locojax.server.wire import Provenance, Span, TrainBody
from locojax.types import Datum

LOSS = "stable_reinforce"
MAX_IN_MEMORY = 16_384
REFRESHED_EVERY = 600.0
READ_AT_ONCE = 500


class SequenceBook:
    """The records, newest in memory, all in the store."""

    def __init__(self, store: Store, settings: ServiceSettings):
        self._store, self._settings = store, settings
        self._recent: collections.OrderedDict[str, Sequence] = collections.OrderedDict()

    def record(self, session_id: str, sequence_ids: list[str], sampled: Sampled, temperature: float) -> None:
        """Remembers a sample's completions."""
        now = time.time()
        rows = []
        for sequence_id, completion in zip(sequence_ids, sampled.completions, strict=True):
            tempered = completion.logprobs_of == "tempered" and temperature > 0
            sequence = Sequence(
                sequence_id,
                session_id,
                np.asarray(completion.tokens, "<i4").tobytes(),
                np.asarray(completion.logprobs, "<f4").tobytes(),
                temperature if tempered else 1.0,
                now,
            )
            rows.append(row(sequence))
            self._remember(sequence)
        ids = [one["sequence_id"] for one in rows]

        def job(connection: sa.Connection) -> None:
            connection.execute(sa.delete(SEQUENCES).where(SEQUENCES.c.sequence_id.in_(ids)))
            connection.execute(sa.insert(SEQUENCES), rows)

        self._store.submit(job)

    async def resolve(self, session_id: str, body: TrainBody) -> TrainBody:
        """The request with `logprobs` and `weights` filled in. ServiceError 400: what it claims isn't so."""
        spans = [_of(provenance, i).targets for i, provenance in enumerate(body.provenance)]
        wanted = {span.sequence_id for one in spans for span in one if span.source == "sampled"}
        found = await self._find(wanted)
        for sequence_id in wanted:
            if sequence_id not in found or found[sequence_id].session_id != session_id:
                raise ServiceError(
                    400,
                    f"The server has no record of sampling the sequence {sequence_id!r}",
                    expected="a sequence_id of this session, sampled with record_stability_info=True in the last "
                    f"{self._settings.provenance_retention / 3600:g} hours",
                    remedy="Make the sampling client with record_stability_info=True, or use importance_sampling",
                )
        data = tuple(_filled(i, datum, one, found) for i, (datum, one) in enumerate(zip(body.data, spans, strict=True)))
        config = dict(body.loss_config)
        temperatures = {found[sequence_id].temperature for sequence_id in wanted}
        if len(temperatures) > 1:
            raise ServiceError(
                400,
                "The sequences of this request were sampled at different temperatures",
                got=", ".join(f"{one:g}" for one in sorted(temperatures)),
                remedy="Send those of one temperature in one request",
            )
        if temperatures and temperatures != {1.0}:
            config.setdefault("temperature", temperatures.pop())
        return dataclasses.replace(body, data=data, loss_config=config)

    async def trim(self, now: float) -> None:
        """Forgets what hasn't been used for the retention."""
        oldest = now - self._settings.provenance_retention
        old = sa.delete(SEQUENCES).where(SEQUENCES.c.used_at < oldest)
        await self._store.write(lambda connection: connection.execute(old))
        for sequence_id in [key for key, one in self._recent.items() if one.used_at < oldest]:
            del self._recent[sequence_id]

    async def _find(self, wanted: set[str]) -> dict[str, Sequence]:
        found = {key: self._recent[key] for key in wanted if key in self._recent}
        missing = sorted(wanted.difference(found))

        def query(connection: sa.Connection) -> list[Sequence]:
            rows: list[Sequence] = []
            for first in range(0, len(missing), READ_AT_ONCE):
                ids = missing[first : first + READ_AT_ONCE]
                rows += select(connection, Sequence, SEQUENCES.c.sequence_id.in_(ids))
            return rows

        if missing:
            for sequence in await self._store.read(query):
                found[sequence.sequence_id] = sequence
                self._remember(sequence)
        self._refresh(found.values())
        return found

    def _refresh(self, used: Any) -> None:
        now = time.time()
        stale = [one for one in used if one.used_at < now - REFRESHED_EVERY]
        for one in stale:
            one.used_at = now
            self._store.update(one, "used_at")

    def _remember(self, sequence: Sequence) -> None:
        self._recent[sequence.sequence_id] = sequence
        while len(self._recent) > MAX_IN_MEMORY:
            self._recent.popitem(last=False)


def _of(provenance: Provenance | None, i: int) -> Provenance:
    if provenance is None:
        raise ServiceError(
            400,
            f"data[{i}] does not say where its tokens were sampled; {LOSS} needs it",
            remedy="Use Datum.with_provenance, or the loss importance_sampling",
        )
    return provenance


def _filled(i: int, datum: Datum, spans: tuple[Span, ...], found: dict[str, Sequence]) -> Datum:
    targets = np.asarray(datum.inputs["target_tokens"])
    logprobs, sampled = np.zeros(targets.shape, np.float32), np.zeros(targets.shape, np.float32)
    position = 0
    for span in spans:
        here = slice(position, position + span.length)
        position += span.length
        if span.source != "sampled":
            continue
        sequence = found[span.sequence_id]
        tokens = np.frombuffer(sequence.tokens, "<i4")
        there = slice(span.offset, span.offset + span.length)
        if there.stop > len(tokens):
            raise ServiceError(
                400,
                f"data[{i}] names tokens {span.offset} to {there.stop} of the sequence {span.sequence_id}",
                expected=f"at most its {len(tokens)} sampled tokens",
            )
        differs = np.flatnonzero(targets[here] != tokens[there])
        if differs.size:
            at = here.start + int(differs[0])
            raise ServiceError(
                400,
                f"data[{i}].target_tokens[{at}] is not what was sampled in the sequence {span.sequence_id}",
                got=int(targets[at]),
                expected=int(tokens[span.offset + int(differs[0])]),
            )
        logprobs[here] = np.frombuffer(sequence.logprobs, "<f4")[there]
        sampled[here] = 1.0
    advantages = np.asarray(datum.inputs.get("advantages", sampled))
    outside = np.flatnonzero((advantages != 0) & (sampled == 0))
    if outside.size:
        raise ServiceError(
            400,
            f"data[{i}].advantages[{int(outside[0])}] is not zero, but its token was not sampled",
            got=float(advantages[outside[0]]),
            expected="nonzero advantages only where loss_fn_input_spans say that the token was sampled",
        )
    weights = np.asarray(datum.inputs.get("weights", sampled), np.float32) * sampled
    return Datum(datum.tokens, {**datum.inputs, "logprobs": logprobs, "weights": weights})
