"""Runs the prefill programs: new prompts into the cache, packed or in chunks, and the log-probs of prompts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from locojax.models.decoder import Params
from locojax.models.executables import Program
from locojax.models.lora import Adapters
from locojax.rollout import programs, sampling
from locojax.rollout.layouts import Cache, Destination, Layout
from locojax.rollout.pages import PromptBlock, Shape, power_of_two
from locojax.rollout.prefill import MAX_WASTE, batches, common_header, pack, pack_pinned, pinned_rows
from locojax.rollout.scheduler import NewPrompt
from locojax.types import MASKED_LOGPROB, SampleRequest

SCORE_TILE = 64
"""Prompt positions whose logits exist at one time."""

CHUNKS = (64, 256)
"""Where shapes are pinned: tokens of the chunks, besides the budget, in which a prompt that continues another goes."""


@dataclasses.dataclass(frozen=True)
class Loaded:
    """The weights that programs run with; `signature` stands for all their shapes and dtypes."""

    weights: Params
    adapters: Adapters | None
    signature: int


@dataclasses.dataclass(frozen=True)
class Asked:
    """A request that asks about its prompt, and the seed its samples are drawn with."""

    request: SampleRequest
    seed: int | str


@dataclasses.dataclass(frozen=True)
class PromptScores:
    """As the fields of `SampleResult` by these names; positions that aren't scored hold what it says there."""

    logprobs: np.ndarray  # f32[P]
    top: tuple[np.ndarray, np.ndarray]  # [P, k]
    targets: np.ndarray  # f32[P - 1, J]
    drawn: tuple[np.ndarray, np.ndarray]  # [P, A]

    @classmethod
    def blank(cls, request: SampleRequest) -> PromptScores:
        """Room for a request's answers, nothing scored."""
        P, targets = len(request.prompt), request.target_prompt_logprobs

        def table(width: int) -> tuple[np.ndarray, np.ndarray]:
            return np.zeros((P, width), np.int32), np.full((P, width), MASKED_LOGPROB, np.float32)

        of_targets = np.zeros((P - 1, 0 if targets is None else targets.shape[1]), np.float32)
        top, drawn = table(request.topk_prompt_logprobs), table(request.prompt_alt_tokens)
        return cls(np.full(P, np.nan, np.float32), top, of_targets, drawn)


class Prefiller:
    """See the module's head. `budget`: tokens of one program run; `max_prompts`: stored by one."""

    def __init__(self, compiler: programs.Compiler, layout: Layout, budget: int, max_prompts: int):
        self._compiler, self._layout, self._budget, self._max_prompts = compiler, layout, budget, max_prompts
        small = CHUNKS if layout.pins_shapes else ()
        self._chunk_sizes = (*(size for size in small if size < budget), budget)

    def run(
        self,
        loaded: Loaded,
        cache: Cache,
        shape: Shape,
        prompts: Sequence[NewPrompt],
        asked: Mapping[str, Asked],
        keep: Callable[[Cache], None],
    ) -> dict[str, PromptScores]:
        """Computes and stores the prompts; `keep` is given the new cache after every program, as each donates the last.

        Returns the scores of prompts with `scored_for`, of which `asked` tells what is wanted.
        """
        scores: dict[str, PromptScores] = {}
        for adapter in dict.fromkeys(p.adapter for p in prompts):
            for chosen, in_chunks in self._batches([p for p in prompts if p.adapter == adapter]):
                if in_chunks:
                    cache, hidden = self._chunks(loaded, cache, shape, chosen[0], keep)
                else:
                    cache, hidden = self._packed(loaded, cache, shape, chosen, keep)
                for prompt, states in zip(chosen, hidden, strict=True):
                    if prompt.scored_for is not None and states is not None:
                        wanted = asked[prompt.scored_for]
                        scores[prompt.scored_for] = self._score(loaded, wanted, states)
        return scores

    def _batches(self, prompts: Sequence[NewPrompt]) -> list[tuple[list[NewPrompt], bool]]:
        """What is computed by one program, and what in chunks of its own: a prompt beyond the budget, or one that
        continues another, unless all of these together take fewer tokens from their beginnings."""
        continued = [p for p in prompts if p.block.num_stem]
        if continued:
            header = common_header([p.tokens for p in continued])
            together = header + sum(len(p.tokens) - header for p in continued)
            if sum(sum(self._chunks_of(p)) for p in continued) > together <= self._budget:
                continued = []
        whole = [p for p in prompts if p not in continued]
        header = common_header([p.tokens for p in whole])
        most = self._max_prompts if self._layout.pins_shapes else None
        found = []
        for batch in batches([len(p.tokens) for p in whole], self._budget, header, most):
            chosen = [whole[n] for n in batch]
            found.append((chosen, len(chosen) == 1 and len(chosen[0].tokens) > self._budget))
        return found + [([p], True) for p in continued]

    def _chunks_of(self, prompt: NewPrompt) -> list[int]:
        """The sizes of the chunks in which a prompt is computed, the last one's with its padding."""
        left = len(prompt.tokens) - prompt.block.num_stem
        whole, rest = divmod(left, self._budget)
        last = [next(size for size in self._chunk_sizes if size >= rest)] if rest else []
        return [self._budget] * whole + last

    def _packed(
        self, loaded: Loaded, cache: Cache, shape: Shape, prompts: Sequence[NewPrompt], keep: Callable[[Cache], None]
    ) -> tuple[Cache, list[np.ndarray | None]]:
        tokens, P = [p.tokens for p in prompts], 0
        if self._layout.pins_shapes:
            like: tuple[Any, ...] = (loaded.signature,)
            packed = pack_pinned(tokens, self._budget, self._max_prompts)
        else:
            least, made = self._layout.prompt_capacity(max(map(len, tokens)), shape), self._compiler.keys("prefill")
            enough = (key[2] for key in made if key[:2] == (loaded.signature, shape) and key[2] >= least)
            P = min((size for size in enough if size <= MAX_WASTE * least), default=least)
            like = (loaded.signature, shape, P)
            packed = pack(tokens, [key[-1] for key in made if key[:-1] == like])
        source, last, to = self._layout.place([p.block for p in prompts], packed, P)
        adapter = np.full(packed.shape.rows, prompts[0].adapter, np.int32)
        part, hidden = self._compiler.call(
            "prefill", (*like, packed.shape), loaded.weights, loaded.adapters, self._layout.prefill_part(cache),
            (packed.tokens, packed.positions, packed.until), source, last, to, adapter,
        )  # fmt: skip
        cache = self._layout.after_prefill(cache, part)
        keep(cache)
        wanted = [p.scored_for is not None for p in prompts]
        states = np.asarray(hidden) if any(wanted) else None
        return cache, [
            states[where] if want and states is not None else None
            for want, where in zip(wanted, packed.source, strict=True)
        ]

    def prepare_alone(self, loaded: Loaded, cache: Cache, shape: Shape, num_tokens: int, page_size: int) -> Program:
        """Compiles what one prompt of this length takes that comes when a slot gets free, where shapes aren't pinned:
        else it would go through the program of a whole batch. `cache`, of this shape, may be abstract."""
        P = self._layout.prompt_capacity(num_tokens, shape)
        packed = pack([(0,) * num_tokens])
        block = PromptBlock(num_tokens, 0, [0] * -(-num_tokens // page_size))
        source, last, to = self._layout.place([block], packed, P)
        return self._compiler.prepare(
            "prefill", (loaded.signature, shape, P, packed.shape), loaded.weights, loaded.adapters,
            self._layout.prefill_part(cache), (packed.tokens, packed.positions, packed.until), source, last, to,
            np.zeros(packed.shape.rows, np.int32),
        )  # fmt: skip

    def prepare(self, loaded: Loaded, cache: Cache, page_size: int) -> list[Program]:
        """Compiles what prompts of any length and number up to the budget will need, where shapes are pinned, and the
        log-probs of prompts. `cache` may be abstract. Returns the programs, that of the shortest prompts first."""
        prepared = []
        part, D = self._layout.prefill_part(cache), cache["last"].shape[1]
        for size in pinned_rows(self._budget):
            packed = pack_pinned([(0,) * size], self._budget, self._max_prompts)
            block = PromptBlock(size, 0, [0] * -(-size // page_size))
            source, last, to = self._layout.place([block], packed, 0)
            program = self._compiler.prepare(
                "prefill", (loaded.signature, packed.shape), loaded.weights, loaded.adapters, part,
                (packed.tokens, packed.positions, packed.until), source, last, to, np.zeros(1, np.int32),
            )  # fmt: skip
            prepared.append(program)
        nothing, count = Shape(), np.zeros((), np.int32)
        for T in self._chunk_sizes:
            P = self._layout.prompt_capacity(T, nothing)
            prompt = NewPrompt(PromptBlock(1, 0, [0]), (0,), 0, None)
            key, tokens, to = self._chunk(loaded, nothing, prompt, 0, 1, (T, P))
            program = self._compiler.prepare(
                "prefill_chunk", key, loaded.weights, loaded.adapters, part, tokens, count, count, to,
                np.zeros(1, np.int32),
            )  # fmt: skip
            prepared.append(program)
        tile = jax.ShapeDtypeStruct((SCORE_TILE, D), cache["last"].dtype)
        rows = programs.ScoreRows(
            np.zeros((SCORE_TILE, 1), np.int32), np.zeros(SCORE_TILE, np.int32), np.float32(1),
            np.zeros((0, 2), np.uint32), np.zeros(1, np.int32),
        )  # fmt: skip
        program = self._compiler.prepare(
            "score", (loaded.signature, 0, 1, 0), loaded.weights, loaded.adapters, tile, rows, num_top=0
        )
        return [*prepared, program]

    def _chunks(
        self, loaded: Loaded, cache: Cache, shape: Shape, prompt: NewPrompt, keep: Callable[[Cache], None]
    ) -> tuple[Cache, list[np.ndarray | None]]:
        length, start = len(prompt.tokens), prompt.block.num_stem
        P = self._layout.prompt_capacity(length, shape)
        states = []
        for T in self._chunks_of(prompt):
            count = min(T, length - start)
            key, tokens, to = self._chunk(loaded, shape, prompt, start, count, (T, P))
            part, hidden = self._compiler.call(
                "prefill_chunk", key, loaded.weights, loaded.adapters, self._layout.prefill_part(cache),
                tokens, np.asarray(start, np.int32), np.asarray(count, np.int32), to,
                np.full(1, prompt.adapter, np.int32),
            )  # fmt: skip
            cache = self._layout.after_prefill(cache, part)
            keep(cache)
            if prompt.scored_for is not None:
                states.append(np.asarray(hidden)[:count])
            start += count
        return cache, [np.concatenate(states) if states else None]

    def _chunk(
        self, loaded: Loaded, shape: Shape, prompt: NewPrompt, start: int, count: int, size: tuple[int, int]
    ) -> tuple[Any, np.ndarray, Destination]:
        """The program's key, i32[1, T] tokens and destination of a chunk; size: (T, P)."""
        T, P = size
        key = (loaded.signature, P, T) if self._layout.pins_shapes else (loaded.signature, shape, P, T)
        tokens = np.zeros((1, T), np.int32)
        tokens[0, :count] = prompt.tokens[start : start + count]
        return key, tokens, self._layout.place_chunk(prompt.block, start, count, T, P)

    def _score(self, loaded: Loaded, asked: Asked, states: np.ndarray) -> PromptScores:
        """states [P, D] -> scores; the state at i-1 predicts token i. In tiles, so that logits stay [tile, V]."""
        request, scores = asked.request, PromptScores.blank(asked.request)
        length, last_n = len(request.prompt), request.prompt_logprobs_last_n
        begin = 1 if last_n is None else max(1, length - last_n)
        k, A = scores.top[0].shape[1], scores.drawn[0].shape[1]
        J = scores.targets.shape[1]
        width = power_of_two(1 + J)
        keys = np.zeros((power_of_two(A) if A else 0, 2), np.uint32)
        for j in range(A):
            keys[j] = sampling.key_of(f"{asked.seed}/alternatives", j)
        num_top = power_of_two(k) if k else 0
        for at in range(begin, length, SCORE_TILE):
            count = min(SCORE_TILE, length - at)
            tile = np.zeros((SCORE_TILE, states.shape[1]), states.dtype)
            tile[:count] = states[at - 1 : at - 1 + count]
            targets = np.zeros((SCORE_TILE, width), np.int32)
            targets[:count, 0] = request.prompt[at : at + count]
            if request.target_prompt_logprobs is not None:
                targets[:count, 1 : 1 + J] = np.maximum(request.target_prompt_logprobs[at - 1 : at - 1 + count], 0)
            rows = programs.ScoreRows(
                targets, np.arange(at, at + SCORE_TILE, dtype=np.int32),
                np.asarray(request.params.temperature, np.float32), keys, np.full(1, request.adapter, np.int32),
            )  # fmt: skip
            out = self._compiler.call(
                "score", (loaded.signature, num_top, width, len(keys)), loaded.weights, loaded.adapters, tile, rows,
                num_top=num_top,
            )  # fmt: skip
            here, of_targets = slice(at, at + count), np.asarray(out.targets)[:count]
            scores.logprobs[here] = of_targets[:, 0]
            scores.targets[at - 1 : at - 1 + count] = of_targets[:, 1 : 1 + J]
            for (ids, logprobs), new_ids, new in (
                (scores.top, out.top_ids, out.top_logprobs), (scores.drawn, out.drawn_ids, out.drawn_logprobs),
            ):  # fmt: skip
                ids[here] = np.asarray(new_ids)[:count, : ids.shape[1]]
                logprobs[here] = np.asarray(new)[:count, : ids.shape[1]]
        if request.target_prompt_logprobs is not None:
            scores.targets[request.target_prompt_logprobs < 0] = 0.0
        return scores
