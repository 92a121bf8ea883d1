"""jax's profiler as `division` needs it: when each of this host's devices ran programs, worked and met others.

The profiler's own file is read, without any plugin. Where the operations are found in it:

* TPU: a plane for each device; its line "XLA Modules" says when programs ran, "XLA Ops" what they did. A collective
  that runs beside computation is split into a start and a done, and what is waited for is the done's time.
* GPU: a plane for each device with a line for each stream; kernels are the operations, NCCL's the collectives.
* CPU: one plane for the host, a line for each thread; operations are the events that name their HLO instruction and
  device. A program ran from the first to the last operation of one run.
"""

from __future__ import annotations

import contextlib
import pathlib
import re
import warnings
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, cast

import jax
import numpy as np

from locojax.errors import HostError
from locojax.hosts.phases import Phase
from locojax.measure.division import DeviceSpans, StepSpans, merge

_MARK = "locojax:"
_STEP = "step"
_HOST_PLANE = "/host:CPU"
_DEVICE_PLANE = "/device:"
_PROGRAMS, _OPERATIONS, _STREAM = "XLA Modules", "XLA Ops", "Stream"

# An instruction is named after its opcode or, where jax made it, after jax's primitive.
_COLLECTIVE = re.compile(
    r"%?(all-reduce|all-gather|reduce-scatter|all-to-all|ragged-all-to-all|collective-|async-collective|send|recv"
    r"|psum|pmax|pmin|ppermute|pshuffle|pbroadcast|all_gather|all_to_all|ragged_all_to_all|reduce_scatter"
    r"|[\w:]*nccl)"
)
_CONTAINER = re.compile(r"%?(while|cond|conditional|call)([._]\d+)?$")
"""Instructions whose time is that of others inside them, which have events of their own."""


@contextlib.contextmanager
def recording(folder: pathlib.Path) -> Iterator[None]:
    """Traces this process's block into `folder`; `read` then finds it there."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # an event for every Python call would slow the host, which is to be measured
    options.host_tracer_level = 2  # with XLA's operations on CPU
    jax.profiler.start_trace(str(folder), profiler_options=options)
    try:
        yield
    finally:
        jax.profiler.stop_trace()


def marked_step() -> contextlib.AbstractContextManager[Any]:
    """Marks the block as the step that is looked at."""
    return jax.profiler.TraceAnnotation(_MARK + _STEP)


def marked_phase(name: Phase) -> contextlib.AbstractContextManager[Any]:
    """Marks the block as a phase. Outside of a recording it costs nothing to speak of."""
    return jax.profiler.TraceAnnotation(_MARK + name)


def read(folder: pathlib.Path) -> StepSpans:
    """The marked step of the recording in `folder`.

    Raises:
      HostError: there is no marked step, or no device did anything in it.
    """
    with warnings.catch_warnings():
        # jaxlib's reader makes its types when they are first used, and aborts where Python's "no __module__" of them is
        # an error.
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        return _read(folder)


def _read(folder: pathlib.Path) -> StepSpans:
    paths = sorted(folder.glob("plugins/profile/*/*.xplane.pb"))
    planes = [plane for path in paths for plane in jax.profiler.ProfileData.from_file(str(path)).planes]
    marks = [mark for plane in planes if plane.name == _HOST_PLANE for mark in _marks(plane)]
    step = next(((start, end) for name, start, end in marks if name == _STEP), None)
    devices = [_device(plane) for plane in planes if plane.name.startswith(_DEVICE_PLANE)]
    devices = [device for device in devices if len(device.busy)]
    if not devices:
        devices = [spans for plane in planes if plane.name == _HOST_PLANE for spans in _cpu_devices(plane)]
    if step is None or not devices:
        missing = "no marked step" if step is None else "no operation of any device"
        raise HostError("The profiler's recording of the step is of no use", got=missing, expected="both of them")
    phases = [(cast(Phase, name), start, end) for name, start, end in marks if name != _STEP]
    return StepSpans(*step, phases, devices)


def is_collective(name: str, category: str = "") -> bool:
    """Whether an operation is a meeting of devices, by its instruction's or kernel's name, or its HLO category."""
    return bool(_COLLECTIVE.match(name) or _COLLECTIVE.match(category))


def _marks(plane: Any) -> Iterator[tuple[str, int, int]]:
    for line in plane.lines:
        for event in line.events:
            if event.name.startswith(_MARK):
                yield event.name.removeprefix(_MARK), int(event.start_ns), int(event.start_ns + event.duration_ns)


def _device(plane: Any) -> DeviceSpans:
    """One accelerator's plane."""
    lines = {line.name: list(line.events) for line in plane.lines}
    operations = lines.get(_OPERATIONS)
    if operations is None:
        operations = [event for name, events in lines.items() if name.startswith(_STREAM) for event in events]
    collective, working = _Spans(), _Spans()
    for event in operations:
        name = _instruction(event.name)
        if _CONTAINER.match(name):
            continue
        category = str(dict(event.stats).get("hlo_category", ""))
        (collective if is_collective(name, category) else working).add_event(event)
    busy = _Spans()
    for event in lines.get(_PROGRAMS, operations):
        busy.add_event(event)
    return DeviceSpans(busy.merged(), collective.merged(), working.merged())


def _cpu_devices(plane: Any) -> list[DeviceSpans]:
    """The CPU's devices, by their number: all of them in one plane, told apart by each event's statistics."""
    runs: dict[int, dict[tuple[Any, Any], tuple[int, int]]] = defaultdict(dict)
    collective: dict[int, _Spans] = defaultdict(_Spans)
    working: dict[int, _Spans] = defaultdict(_Spans)
    for line in plane.lines:
        for event in line.events:
            stats = dict(event.stats)
            if "hlo_op" not in stats or "device_ordinal" not in stats:
                continue
            device, start = int(stats["device_ordinal"]), int(event.start_ns)
            end = start + int(event.duration_ns)
            run = stats.get("run_id"), stats.get("program_id")
            first, last = runs[device].get(run, (start, end))
            runs[device][run] = min(first, start), max(last, end)
            name = _instruction(str(stats["hlo_op"]))
            if not _CONTAINER.match(name):
                (collective if is_collective(name) else working)[device].add(start, end)
    return [
        DeviceSpans(merge(np.array(list(runs[device].values()))), collective[device].merged(), working[device].merged())
        for device in sorted(runs)
    ]


def _instruction(name: str) -> str:
    """The instruction of an event's name, which may be its whole line of HLO. Example: "%fusion.3 = f32[8]{0} ..."."""
    return name.partition(" ")[0]


class _Spans:
    """Collects spans in any order."""

    def __init__(self) -> None:
        self._ends: list[tuple[int, int]] = []

    def add(self, start: int, end: int) -> None:
        self._ends.append((start, end))

    def add_event(self, event: Any) -> None:
        self.add(int(event.start_ns), int(event.start_ns + event.duration_ns))

    def merged(self) -> np.ndarray:
        return merge(np.array(self._ends, np.int64).reshape(-1, 2))
