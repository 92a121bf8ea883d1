"""Host arrays for the compiled programs, from the samples that run."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from locojax.rollout.layouts import Tables
from locojax.rollout.pages import power_of_two
from locojax.rollout.programs import DecodeRows
from locojax.rollout.request import Sample
from locojax.rollout.sampling import SamplerRows, settings_of

MIN_STOP_IDS = 4


def num_stop_ids(samples: Sequence[Sample]) -> int:
    """S of the samples' stop-id table: a power of two, so that few programs are compiled."""
    return power_of_two(max(MIN_STOP_IDS, *(len(sample.stop.ids) for sample in samples)))


def decode_rows(samples: Sequence[Sample], num_rows: int, num_stops: int, tables: Tables) -> DecodeRows:
    """Each sample at its slot's row; rows between them are dead."""

    def full(value: float | int | bool, dtype: type) -> np.ndarray:
        return np.full(num_rows, value, dtype)

    token, own, remaining, adapter, position, top_k = (full(0, np.int32) for _ in range(6))
    alive, fresh = full(False, np.bool_), full(False, np.bool_)
    temperature, top_p, min_p = full(1, np.float32), full(1, np.float32), full(0, np.float32)
    key, stop_ids = np.zeros((num_rows, 2), np.uint32), np.full((num_rows, num_stops), -1, np.int32)
    for sample in samples:
        assert sample.slot is not None
        row = sample.slot.row
        alive[row], fresh[row] = True, sample.fresh
        token[row] = sample.tokens[-1] if sample.tokens else 0
        own[row], remaining[row] = sample.num_stored, sample.remaining
        stop_ids[row, : len(sample.stop.ids)] = sample.stop.ids
        adapter[row], key[row], position[row] = sample.request.adapter, sample.key, len(sample.tokens)
        temperature[row], top_k[row], top_p[row], min_p[row] = settings_of(sample.request.params)
    sampler = SamplerRows(key, position, temperature, top_k, top_p, min_p)
    return DecodeRows(token, own, alive, fresh, remaining, stop_ids, adapter, sampler, tables)
