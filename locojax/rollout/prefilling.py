"""Runs the prefill programs: new prompts into the cache, packed or in chunks, and the log-probs of prompts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from locojax.models.decoder import Params
from locojax.models.lora import Adapters
from locojax.rollout import programs
from locojax.rollout.layouts import Cache, Layout
from locojax.rollout.pages import Shape, power_of_two
from locojax.rollout.prefill import batches, common_header, pack
from locojax.rollout.scheduler import NewPrompt

SCORE_TILE = 64
"""Prompt positions whose logits exist at one time."""


@dataclasses.dataclass(frozen=True)
class Loaded:
    """The weights that programs run with; `signature` stands for all their shapes and dtypes."""

    weights: Params
    adapters: Adapters | None
    signature: int


@dataclasses.dataclass(frozen=True)
class PromptScores:
    """logprobs f32[P], entry 0 NaN; top ids i32[P, k] (entry 0: -1) and log-probs f32[P, k], None for k = 0."""

    logprobs: np.ndarray
    top: tuple[np.ndarray, np.ndarray] | None


class Prefiller:
    """See the module's head. `budget`: tokens of one program run."""

    def __init__(self, compiler: programs.Compiler, layout: Layout, budget: int):
        self._compiler, self._layout, self._budget = compiler, layout, budget

    def run(
        self,
        loaded: Loaded,
        cache: Cache,
        shape: Shape,
        prompts: Sequence[NewPrompt],
        num_top: Mapping[str, int],
        keep: Callable[[Cache], None],
    ) -> dict[str, PromptScores]:
        """Computes and stores the prompts; `keep` is given the new cache after every program, as each donates the last.

        Returns the scores of prompts with `scored_for`, of which `num_top` tells how many alternatives are wanted.
        """
        scores: dict[str, PromptScores] = {}
        for adapter in dict.fromkeys(p.adapter for p in prompts):
            ours = [p for p in prompts if p.adapter == adapter]
            header = common_header([p.tokens for p in ours])
            for batch in batches([len(p.tokens) for p in ours], self._budget, header):
                chosen = [ours[n] for n in batch]
                if len(chosen) == 1 and len(chosen[0].tokens) > self._budget:
                    cache, hidden = self._chunks(loaded, cache, shape, chosen[0], keep)
                else:
                    cache, hidden = self._packed(loaded, cache, shape, chosen, keep)
                for prompt, states in zip(chosen, hidden, strict=True):
                    if prompt.scored_for is not None and states is not None:
                        wanted = num_top[prompt.scored_for]
                        scores[prompt.scored_for] = self._score(loaded, prompt, states, wanted)
        return scores

    def _packed(
        self, loaded: Loaded, cache: Cache, shape: Shape, prompts: Sequence[NewPrompt], keep: Callable[[Cache], None]
    ) -> tuple[Cache, list[np.ndarray | None]]:
        P = self._layout.prompt_capacity(max(len(p.tokens) for p in prompts), shape)
        like = (loaded.signature, shape, P)
        known = [key[-1] for key in self._compiler.keys("prefill") if key[:-1] == like]
        packed = pack([p.tokens for p in prompts], known)
        N = packed.shape.prompts
        source, last = np.zeros((N, P), np.int32), np.zeros(N, np.int32)
        for n, where in enumerate(packed.source):
            source[n, : len(where)], last[n] = where, where[-1]
        to = self._layout.destination([p.block for p in prompts], N, P)
        adapter = np.full(packed.shape.rows, prompts[0].adapter, np.int32)
        cache, hidden = self._compiler.call(
            "prefill", (*like, packed.shape), loaded.weights, loaded.adapters, cache,
            (packed.tokens, packed.positions, packed.until), source, last, to, adapter,
        )  # fmt: skip
        keep(cache)
        wanted = [p.scored_for is not None for p in prompts]
        states = np.asarray(hidden) if any(wanted) else None
        return cache, [
            states[where] if want and states is not None else None
            for want, where in zip(wanted, packed.source, strict=True)
        ]

    def _chunks(
        self, loaded: Loaded, cache: Cache, shape: Shape, prompt: NewPrompt, keep: Callable[[Cache], None]
    ) -> tuple[Cache, list[np.ndarray | None]]:
        T, length = self._budget, len(prompt.tokens)
        P = self._layout.prompt_capacity(length, shape)
        to = self._layout.destination([prompt.block], 1, P)
        states = []
        for start in range(0, length, T):
            count = min(T, length - start)
            tokens = np.zeros((1, T), np.int32)
            tokens[0, :count] = prompt.tokens[start : start + count]
            cache, hidden = self._compiler.call(
                "prefill_chunk", (loaded.signature, shape, P, T), loaded.weights, loaded.adapters, cache,
                tokens, np.asarray(start, np.int32), np.asarray(count, np.int32), to,
                np.full(1, prompt.adapter, np.int32),
            )  # fmt: skip
            keep(cache)
            if prompt.scored_for is not None:
                states.append(np.asarray(hidden)[:count])
        return cache, [np.concatenate(states) if states else None]

    def _score(self, loaded: Loaded, prompt: NewPrompt, states: np.ndarray, num_top: int) -> PromptScores:
        """states [P, D] -> scores; the state at i-1 predicts token i. In tiles, so that logits stay [tile, V]."""
        length, k = len(prompt.tokens), power_of_two(num_top) if num_top else 1
        logprobs = np.full(length, np.nan, np.float32)
        ids, tops = np.full((length, k), -1, np.int32), np.full((length, k), np.nan, np.float32)
        for start in range(0, length - 1, SCORE_TILE):
            count = min(SCORE_TILE, length - 1 - start)
            tile = np.zeros((SCORE_TILE, states.shape[1]), states.dtype)
            tile[:count] = states[start : start + count]
            targets = np.zeros(SCORE_TILE, np.int32)
            targets[:count] = prompt.tokens[start + 1 : start + 1 + count]
            of_target, top_ids, top = self._compiler.call(
                "score", (loaded.signature, k), loaded.weights, loaded.adapters, tile, targets,
                np.full(1, prompt.adapter, np.int32), num_top=k,
            )  # fmt: skip
            at = slice(start + 1, start + 1 + count)
            logprobs[at] = np.asarray(of_target)[:count]
            ids[at], tops[at] = np.asarray(top_ids)[:count], np.asarray(top)[:count]
        return PromptScores(logprobs, (ids[:, :num_top], tops[:, :num_top]) if num_top else None)
