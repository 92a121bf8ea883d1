"""One host's generation engine. `step()` is three calls: schedule, run, finish.

Nothing here waits for another host, and the host is off the per-token path: a step decodes many tokens in one program.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Literal

import jax
import numpy as np

from locojax.errors import ConfigError, RequestError
from locojax.models.decoder import Params
from locojax.models.executables import Program
from locojax.models.lora import Adapters
from locojax.models.spec import ModelSpec
from locojax.rollout import programs, sampling, warmup
from locojax.rollout.batch import decode_rows, num_stop_ids
from locojax.rollout.layouts import Cache
from locojax.rollout.pace import Pace
from locojax.rollout.pages import Moves, Shape, power_of_two
from locojax.rollout.pending import Pending
from locojax.rollout.policy import Policy
from locojax.rollout.prefilling import Asked, Prefiller
from locojax.rollout.request import Begun, Gained, Sample, TokenBytes, refuse_size, validate
from locojax.rollout.rows import RowsMemory
from locojax.rollout.scheduler import Queue, Schedule
from locojax.rollout.settings import PLAIN_ROWS, EngineSettings, memory_and_layout, scheduler_of
from locojax.rollout.stats import EngineStats, TokenEvent
from locojax.types import SampleRequest, SampleResult

Phase = Callable[[Literal["prefill", "decode"]], AbstractContextManager[None]]


class Engine:
    """Samples completions. One thread at a time may use it.

    Example:
      engine = Engine(spec, EngineSettings(), tokenizer)
      engine.load(decoder.unstack(params, spec, jnp.float32), version=0)
      results = engine.generate([SampleRequest("a", (1, 2, 3), SamplingParams(max_tokens=8), num_samples=4)])
    """

    def __init__(
        self,
        spec: ModelSpec,
        settings: EngineSettings,
        tokens: TokenBytes,
        *,
        phase: Phase | None = None,
        compiler: programs.Compiler | None = None,
    ):
        """An engine without weights; see `load`.

        Args:
          phase: entered around device work, to account for its time.
          compiler: that of an engine with the same spec and settings, to share its programs.

        Raises:
          ConfigError: the settings can't be, or the compiler is another kind of engine's.
        """
        self.spec, self.settings = spec, settings
        self._tokens = tokens
        self._phase: Phase = phase or (lambda name: contextlib.nullcontext())
        self.max_context = min(settings.max_context or spec.max_context, spec.max_context)
        self._memory, self._layout = memory_and_layout(spec, settings)
        self._scheduler: Queue = scheduler_of(self._memory, settings)
        program_spec = programs.ProgramSpec(
            spec, self._layout, settings.dtype, settings.logprobs_of, settings.max_iterations
        )
        self.compiler = compiler or programs.Compiler(program_spec)
        if self.compiler.spec != program_spec:
            raise ConfigError("Only equal engines share programs", got=program_spec, expected=self.compiler.spec)
        self._prefiller = Prefiller(self.compiler, self._layout, settings.max_prefill_tokens, settings.max_slots)
        self._requests: dict[str, Pending] = {}
        self._closed: list[SampleResult] = []  # to be returned by the next step
        self._events: list[TokenEvent] = []
        # Table sizes only grow while samples run: a smaller one would be another program.
        self._table_width, self._num_stops = 1, warmup.PINNED_STOPS if self._layout.pins_shapes else 1
        self._shape = Shape(entries=2 * settings.max_slots)
        self._copies, self._num_added = Moves(), 0
        self._cache: Any = None
        self._spare: Sequence[Program] = ()  # of shapes that are not used before all of them are there
        self._policy, self._stats, self._pace = Policy(), EngineStats(), Pace(settings.turn_seconds)

    def load(self, weights: Params, version: int, adapters: Adapters | None = None, *, interrupt: bool = False) -> None:
        """New weights, in the form of `decoder.unstack`. The KV memory stays; cached prompts are forgotten.

        Args:
          version: the policy version that completions begun from now on are stamped with.
          adapters: one (`scale` f32[]), which `SampleRequest.adapter` 1 picks; or N stacked (`scale` f32[N]), of which
            the index picks one and row 0 is never used: 0 is no adapter.
          interrupt: lets samples that run go on under the new weights: their tokens are kept, prefilled again, and
            they stay stamped with the version they began with.

        Raises:
          RequestError: samples run and `interrupt` is False.
        """
        if self._scheduler.running and not interrupt:
            raise RequestError(
                f"Weights of version {version} can't be loaded while {len(self._scheduler.running)} samples run",
                remedy="Step until they finish, abort them, or load with interrupt=True",
            )
        self._scheduler.preempt_all()
        self._scheduler.drop_prefixes()
        self._policy.take(weights, version, adapters)

    def set_adapter(
        self, row: int, adapter: Mapping[str, Any] | None, scale: float, version: int, *, interrupt: bool = False
    ) -> None:
        """Replaces one of the stacked adapters while others' samples run; nothing is compiled for its rank or modules.

        Cached prompts of that adapter are forgotten, others stay.

        Args:
          row: 1 or more; 0 is no adapter for ever.
          adapter: the tree of `models.lora`, of the stack's rank or a lower one; modules it lacks add nothing. None:
            nothing at all.
          scale: what the adapter's product is multiplied by (`LoraSpec.scale`).
          version: what completions begun with it from now on are stamped with.
          interrupt: lets its samples that run go on under the new weights: their tokens are kept, prefilled again.

        Raises:
          RequestError: no such row, the adapter doesn't fit, or its samples run and `interrupt` is False.
        """
        tree = self._policy.fitted({} if adapter is None else adapter)
        if not 1 <= row < self.num_adapters:
            raise RequestError("No such row of the stacked adapters", got=row, expected=f"1 to {self.num_adapters - 1}")
        num_running = sum(sample.request.adapter == row for sample in self._scheduler.running)
        if num_running and not interrupt:
            raise RequestError(
                f"Adapter {row} can't be replaced while {num_running} of its samples run",
                remedy="Step until they finish, abort them, or replace it with interrupt=True",
            )
        self._scheduler.preempt_all(row)
        self._scheduler.drop_prefixes(row)
        self._policy.replace(self.compiler, row, tree, scale, version)

    def copied(self, adapter: Mapping[str, Any]) -> dict[str, dict[str, np.ndarray]]:
        """What `set_adapter` will take, on the host, at the adapter's own rank, in the stack's dtype; see `stacks`.

        Raises:
          RequestError: it has modules, shapes or a rank that the stack has no place for.
        """
        return self._policy.copied(adapter)

    def version_of(self, adapter: int) -> int:
        """The policy version of an adapter's completions, -1 before there are weights."""
        return self._policy.version_of(adapter)

    @property
    def policy_version(self) -> int | None:
        """That of the weights; None before there are any."""
        return self._policy.version

    def add(self, request: SampleRequest, *, stream: bool = False, begun: Mapping[int, Begun] | None = None) -> None:
        """Queues a request. With `stream`, `drain` tells of its tokens as they come.

        Args:
          begun: by sample index, what was sampled of it elsewhere under the same seed: that is gone on from.

        Raises:
          RequestError: it is malformed, can't fit, or its id is in use. Other requests are not affected.
        """
        if request.request_id in self._requests:
            raise RequestError(f"Request {request.request_id!r} is already running", remedy="Use another request_id")
        max_tokens = self.validate(request)
        seed: Any = request.params.seed
        if seed is None:
            seed = f"unseeded/{self.settings.seed}/{self._num_added}"
        self._num_added += 1
        mine = Pending.of(request, seed, max_tokens, self._tokens, stream, begun or {})
        self._requests[request.request_id] = mine
        self._scheduler.add(sample for sample in mine.samples if sample.stop_reason is None)

    def validate(self, request: SampleRequest) -> int:
        """Refuses what `add` would; returns the most tokens a sample may have.

        Raises:
          RequestError: it is malformed, or can't fit.
        """
        max_tokens = validate(
            request, vocab_size=self.spec.vocab_size, max_context=self.max_context, num_adapters=self.num_adapters
        )
        fits = self._memory.fits_alone(len(request.prompt), max_tokens)
        return max_tokens if fits else refuse_size(request, max_tokens, self.settings.kv_bytes)

    def abort(self, request_id: str) -> bool:
        """Ends a request; the next `step` returns what it has, unfinished samples marked `abort`. False if unknown."""
        if request_id not in self._requests:
            return False
        self._scheduler.remove(request_id)
        self._close(self._requests[request_id])
        return True

    @property
    def num_unfinished(self) -> int:
        """Requests that `step` has yet to return."""
        return len(self._requests) + len(self._closed)

    @property
    def num_free_slots(self) -> int:
        """Slots that no sample runs in or waits for; below 0, so many samples wait for one."""
        return self.settings.max_slots - len(self._scheduler.running) - len(self._scheduler.waiting)

    def step(self) -> list[SampleResult]:
        """Runs what is due and returns the requests that finished.

        Raises:
          RequestError: no weights have been loaded.
        """
        if self.policy_version is None:
            raise RequestError("The engine has no weights", remedy="Call load first")
        start = time.perf_counter()
        busy = self._stats.prefill_seconds + self._stats.decode_seconds
        if self._scheduler.waiting or self._scheduler.running:
            self._spare = warmup.use_spare(self._memory, self._spare)
            self._run(self._schedule())
        results = self._finish()
        busy = self._stats.prefill_seconds + self._stats.decode_seconds - busy
        self._stats.host_seconds += time.perf_counter() - start - busy
        return results

    def generate(self, requests: Iterable[SampleRequest]) -> list[SampleResult]:
        """Adds the requests and steps until they are done; results in their order.

        Raises:
          RequestError: one is malformed; then none of them is run.
        """
        wanted: list[str] = []
        try:
            for request in requests:
                self.add(request)
                wanted.append(request.request_id)
        except RequestError:
            for request_id in wanted:
                self._scheduler.remove(request_id)
                del self._requests[request_id]
            raise
        others: list[SampleResult] = []
        done: dict[str, SampleResult] = {}
        while len(done) < len(wanted):
            results = self.step()
            done |= {result.request_id: result for result in results if result.request_id in wanted}
            others += [result for result in results if result.request_id not in wanted]
        self._closed += others  # for whoever added them and calls step
        return [done[request_id] for request_id in wanted]

    def warm_up(self, requests: Sequence[SampleRequest], longest_prompt: int = 1) -> int:
        """Compiles the programs that requests like these will need, arriving together; returns how many that were.

        Give it the longest prompts and completions to come, as many as come at a time: then a ragged batch of them,
        in whatever order its samples end, compiles nothing more. Nothing is sampled. `longest_prompt` is that of all
        workloads, when several share the engine.

        Raises:
          RequestError: no weights have been loaded, or a request is malformed.
        """
        if self._layout.pins_shapes:
            return self.warm_up_server()
        before = self.compiler.num_compilations
        work = warmup.expected(requests, [*map(self.validate, requests)], longest_prompt, self.settings.max_slots)
        self._memory.expect(work)
        for staggered in (False, True):
            dry = Engine(self.spec, self.settings, self._tokens, compiler=warmup.ShapesOnly(self.compiler))
            dry._policy = self._policy
            dry._memory.expect(work)
            dry.rehearse(requests, staggered=staggered)
        if work.num_prompts:
            ours = self.compiler, self.spec, self.settings, self._layout, self._policy.loaded, self._prefiller
            warmup.prepare_waves(*ours, work.prompt_tokens)
        self.compiler.wait()
        used = {key[1] for name in ("decode", "prefill") for key in self.compiler.keys(name)}
        self._layout.warm_moves(self.spec, used, self.settings.dtype)
        return self.compiler.num_compilations - before

    def rehearse(self, requests: Sequence[SampleRequest], *, staggered: bool) -> None:
        """Runs requests as if nothing stopped them; `staggered`: see `warmup.stagger`. For engines of shapes alone."""
        for request in requests:
            self.add(dataclasses.replace(request, params=dataclasses.replace(request.params, stop=())))
        samples = [sample for mine in self._requests.values() for sample in mine.samples]
        if staggered:
            lengths = warmup.stagger([sample.max_tokens for sample in samples], self._memory.rows.sizes)
            for sample, length in zip(samples, lengths, strict=True):
                sample.max_tokens = length
        while self.num_unfinished:
            self.step()

    def warm_up_server(self) -> int:
        """Compiles all that requests of any number, length and arrival will need; returns how many programs that were.

        Not compiled are programs for likeliest tokens and the like, one for each power of two asked for; for more than
        PINNED_STOPS stop ids; and for prompts beyond `layout_rows.CONTEXT`, one for each four times as many tokens.
        Each of these compiles once, when it is first asked for.

        Raises:
          RequestError: no weights have been loaded.
          ConfigError: the settings' layout isn't "rows".
        """
        if self.policy_version is None:
            raise RequestError("The engine has no weights", remedy="Call load first")
        if not isinstance(self._memory, RowsMemory):
            got = f"layout={self.settings.layout!r}"
            raise ConfigError("An engine can't be warmed up for a server", got=got, expected='layout="rows"')
        before, memory = self.compiler.num_compilations, self._memory
        ours = self.compiler, self.spec, self.settings, self._layout
        self._spare = warmup.prepare_server(
            *ours, memory.shapes(), memory.spare_shapes(), self._policy.loaded, self._prefiller
        )
        return self.compiler.num_compilations - before

    def forget_prompts(self) -> None:
        """Drops cached prompts, so that what comes next finds the memory as it was at the start."""
        self._scheduler.drop_prefixes()

    def drain(self) -> list[TokenEvent]:
        """What streamed requests have sampled since the last call."""
        events, self._events = self._events, []
        return events

    def gained(self) -> list[Gained]:
        """What the samples of unfinished requests have sampled since the last call: enough to go on from elsewhere."""
        found = (sample.gained() for mine in self._requests.values() for sample in mine.samples)
        return [each for each in found if each is not None]

    def stats(self) -> EngineStats:
        """A snapshot of the totals."""
        queue, compiled = self._scheduler, self.compiler.num_compilations
        found = {"num_preemptions": queue.num_preemptions, "num_prefix_hits": queue.num_prefix_hits}
        return dataclasses.replace(self._stats, num_compilations=compiled, **found)

    @property
    def num_adapters(self) -> int:
        """Values that `SampleRequest.adapter` may take: 1 with no adapters loaded, as 0 is none."""
        return self._policy.num_adapters

    def _schedule(self) -> Schedule:
        """Decides what runs, and brings the device's memory into the shape that it needs."""
        scheduler = self._scheduler
        if not scheduler.running:
            self._table_width = 1
        plan = scheduler.schedule()
        final = max((s.num_stored + s.remaining for s in scheduler.running), default=1)
        moves = self._memory.settle(shrink=plan.shrink, final_capacity=final) or Moves()
        if moves.shape is not None:
            self._shape = moves.shape
        resize, self._copies = moves.split()
        if self._cache is None:
            new_cache = partial(self._layout.new_cache, self.spec, self._shape, self.settings.dtype)
            self._cache = self.compiler.apply(new_cache)
        elif resize != Moves():
            self._cache = self.compiler.apply(partial(self._layout.move, moves=resize), self._cache)
        return plan

    def _run(self, plan: Schedule) -> None:
        """Computes new prompts, then decodes."""
        try:
            if plan.prompts:
                with self._phase("prefill"):
                    self._prefill(plan)
            if self._copies != Moves():  # of pages that may just have been filled
                self._cache = self.compiler.apply(partial(self._layout.move, moves=self._copies), self._cache)
            if self._scheduler.running:
                with self._phase("decode"):
                    self._decode(plan)
        except BaseException:
            # The cache was donated and may be gone; what it held can be computed again.
            self._scheduler.preempt_all()
            self._scheduler.drop_prefixes()
            self._cache = None
            raise

    def _prefill(self, plan: Schedule) -> None:
        start = time.perf_counter()
        scored = (self._requests[p.scored_for] for p in plan.prompts if p.scored_for is not None)
        asked = {mine.request.request_id: Asked(mine.request, mine.seed) for mine in scored}
        scores = self._prefiller.run(self._policy.loaded, self._cache, self._shape, plan.prompts, asked, self._keep)
        for request_id, score in scores.items():
            self._requests[request_id].scores = score
        jax.block_until_ready(self._cache["last"])
        self._stats.num_prompt_tokens += sum(len(p.tokens) - p.block.num_stem for p in plan.prompts)
        self._stats.prefill_seconds += time.perf_counter() - start

    def _keep(self, cache: Cache) -> None:
        self._cache = cache

    def _decode(self, plan: Schedule) -> None:
        running, num_rows = self._scheduler.running, self._memory.rows.num_rows
        self._num_stops = max(self._num_stops, num_stop_ids(running))
        slots = [s.slot for s in running if s.slot is not None]
        groups = (min(s.request.num_samples, self.settings.max_slots) for s in running)
        tables = self._layout.tables(slots, num_rows, self._shape, max(self._table_width, *groups))
        self._table_width = self._layout.width(tables)
        rows = decode_rows(running, num_rows, self._num_stops, tables)
        truncates = self._layout.pins_shapes and num_rows < PLAIN_ROWS
        truncates = truncates or any(sampling.truncates(s.request.params) for s in running)
        num_top = max(s.request.topk_sample_logprobs for s in running)
        num_top = power_of_two(num_top) if num_top else 0
        loaded = self._policy.loaded
        key = (loaded.signature, self._shape, num_rows, self._num_stops, self._table_width, truncates, num_top)
        start, most = time.perf_counter(), np.asarray(self._pace.fit(num_rows, plan.num_iterations), np.int32)
        part, drawn, gained, num_iterations = self.compiler.call(
            "decode", key, loaded.weights, loaded.adapters, self._layout.decode_part(self._cache), rows, most,
            np.asarray(plan.return_at, np.int32), truncates=truncates, num_top=num_top,
        )  # fmt: skip
        self._cache = self._layout.after_decode(self._cache, part)
        drawn, gained = jax.tree.map(np.asarray, drawn), np.asarray(gained)
        self._stats.decode_seconds += (seconds := time.perf_counter() - start)
        self._pace.took(num_rows, int(num_iterations), seconds)
        self._stats.num_iterations += int(num_iterations)
        self._stats.row_iterations += int(gained.sum())
        self._stats.padded_row_iterations += num_rows * (int(num_iterations) + int(rows.fresh.any()))
        for sample in list(running):
            assert sample.slot is not None
            row, first = sample.slot.row, 0 if sample.fresh else 1
            new = slice(first, first + int(gained[row]))
            if k := sample.request.topk_sample_logprobs:
                sample.top += zip(drawn.top_ids[new, row, :k], drawn.top_logprobs[new, row, :k], strict=True)
            self._extend(sample, drawn.token[new, row].tolist(), drawn.logprob[new, row].tolist())

    def _extend(self, sample: Sample, tokens: list[int], logprobs: list[float]) -> None:
        """Appends what was sampled, up to a stop string, and frees the slot of a sample that ended."""
        if sample.policy_version is None and tokens:
            sample.policy_version = self.version_of(sample.request.adapter)
        at = len(sample.text)
        taken = sample.append(tokens, logprobs, self._tokens)
        self._stats.num_tokens += taken
        if sample.stop_reason is not None:
            self._scheduler.finish(sample)
        if sample.streamed and taken:
            self._events.append(sample.event(taken, at))

    def _finish(self) -> list[SampleResult]:
        """Collects requests of which no sample runs or waits any more."""
        for mine in list(self._requests.values()):
            if mine.done:
                self._close(mine)
        closed, self._closed = self._closed, []
        return closed

    def _close(self, mine: Pending) -> None:
        del self._requests[mine.request.request_id]
        self._closed.append(mine.result(self.version_of(mine.request.adapter), self.settings.logprobs_of))
