"""One step of a real run, recorded by jax's profiler on every host and divided into what its time went to."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from locojax import settings
from locojax.config import Config
from locojax.hosts.phases import Phase, StepAccount
from locojax.measure import trace
from locojax.measure.coin import COIN
from locojax.measure.division import CLASSES, ROWS, Class, Division, divide
from locojax.measure.timeline import Timeline
from locojax.models.hub import load_spec
from locojax.models.random_model import PREFIX
from locojax.models.spec import num_parameters


@dataclasses.dataclass(frozen=True)
class Profile:
    """The recorded step of every host. Filled by `Recorder`; shown by `profile_report`.

    Attributes:
      hosts: a division for each host, in their order.
      seconds_before: of the step before, which was not recorded, on this host: how much the recording slows a step.
      place: what it ran on, with the devices that did anything. Example: {"platform": "cpu", "num_hosts": 2,
        "num_devices": 2, "device": "cpu", "jax": "0.12.0"}
    """

    model: str
    num_parameters: int
    step: int
    hosts: tuple[Division, ...]
    seconds_before: float | None
    place: Mapping[str, Any]

    def shares(self) -> dict[Class, float]:
        """Each class's share, the mean over the hosts."""
        shares = [division.shares() for division in self.hosts]
        return {name: sum(share[name] for share in shares) / len(shares) for name in CLASSES}


class Recorder(Timeline):
    """A timeline that records one step, and then has all hosts tell each other what they found.

    The recording starts before the step and ends after it, and so does the exchange: neither is in the step's time.

    Args:
      step: the one to record, from 0.
      folder: where the profiler's files are kept; None: nowhere.
    """

    def __init__(self, step: int, folder: pathlib.Path | None = None):
        super().__init__()
        self.recorded_step = step
        self.is_first_host = True
        self.hosts: tuple[Division, ...] = ()
        self.place: Mapping[str, Any] = {}
        self._folder = folder

    @property
    def account_before(self) -> StepAccount | None:
        """The timeline's account of the step before the recorded one."""
        return next((account for account in self.accounts if account.step == self.recorded_step - 1), None)

    @contextlib.contextmanager
    def step(self, index: int) -> Iterator[None]:
        if index != self.recorded_step:
            with super().step(index):
                yield
            return
        with contextlib.ExitStack() as stack:
            folder = self._folder or pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="locojax-")))
            host = folder / f"host{jax.process_index()}"  # several hosts may share the folder
            with trace.recording(host):
                if jax.process_count() > 1:
                    # A host whose profiler is slow to start would be waited for in the step.
                    multihost_utils.sync_global_devices("locojax profile")
                with trace.marked_step(), super().step(index):
                    yield
            self._exchange(divide(trace.read(host)))

    @contextlib.contextmanager
    def phase(self, name: Phase) -> Iterator[None]:
        with super().phase(name), trace.marked_phase(name):
            yield

    def _exchange(self, mine: Division) -> None:
        self.is_first_host = jax.process_index() == 0
        device = jax.local_devices()[0]
        self.place = {
            "platform": device.platform,
            "device": device.device_kind,
            "num_hosts": jax.process_count(),
            "jax": jax.__version__,
        }
        figures = _to_array(mine)
        if jax.process_count() > 1:  # f32 on the way: a step's seconds to a part in ten million
            gathered = np.asarray(multihost_utils.process_allgather(figures.astype(np.float32)))
        else:
            gathered = figures[None]
        self.hosts = tuple(map(_from_array, gathered))
        self.place = {**self.place, "num_devices": sum(division.num_devices for division in self.hosts)}

    def profile(self, model: str) -> Profile:
        """What was recorded, of a run that has ended."""
        count, before = num_parameters(load_spec(model)), self.account_before
        seconds = before.wall if before is not None else None
        return Profile(model, count, self.recorded_step, self.hosts, seconds, self.place)


def _to_array(division: Division) -> np.ndarray:
    """f64[2 + rows x classes]: wall time and devices, then the table; NaN where a phase did not happen."""
    absent = dict.fromkeys(CLASSES, np.nan)
    table = [[division.seconds.get(row, absent)[name] for name in CLASSES] for row in ROWS]
    return np.concatenate([[division.wall, division.num_devices], np.ravel(table)])


def _from_array(figures: np.ndarray) -> Division:
    table = figures[2:].reshape(len(ROWS), len(CLASSES))
    seconds = {
        row: dict(zip(CLASSES, map(float, values), strict=True))
        for row, values in zip(ROWS, table, strict=True)
        if not np.isnan(values).any()
    }
    return Division(float(figures[0]), seconds, int(figures[1]))


def profiled_config(config: Config, num_warm_up: int, folder: str) -> Config:
    """The run to be profiled: as many steps as it takes, and nothing in them but the step itself.

    Args:
      folder: for its run folder.

    A model with random weights solves nothing; where the task's own reward would grade it, a coin does.
    """
    values: dict[str, Any] = {
        "run.name": "profile",
        "run.dir": folder,
        "run.num_steps": num_warm_up + 1,
        "run.eval_every": 0,
        "run.checkpoint_every": 0,
        "run.checkpoint_at_end": False,
        "report.tensorboard": False,
        "report.wandb": False,
    }
    if config.model.name.startswith(PREFIX) and config.data.reward == "task":
        values["data.reward"] = COIN
    return settings.replace(config, values)
