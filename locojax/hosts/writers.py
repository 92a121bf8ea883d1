"""Where a step's numbers can go besides metrics.jsonl. Each writer's package is an extra, imported when asked for."""

from __future__ import annotations

import importlib
import pathlib
from collections.abc import Mapping
from types import ModuleType
from typing import Protocol

from locojax import settings
from locojax.config import Config
from locojax.errors import ConfigError


class MetricWriter(Protocol):
    """Takes each step's flat numbers."""

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """The numbers of one step, steps in order."""

    def close(self) -> None:
        """Nothing more will come; what is buffered must be out afterwards."""


class TensorBoardWriter:
    """TensorBoard event files in `folder`."""

    def __init__(self, folder: pathlib.Path):
        self._writer = _package("tensorboardX", "tensorboard").SummaryWriter(str(folder))

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandbWriter:
    """A run at Weights & Biases; resuming a run of this name goes on with it."""

    def __init__(self, project: str, name: str, config: Mapping[str, object]):
        package = _package("wandb", "wandb")
        self._run = package.init(project=project, name=name, id=name, resume="allow", config=dict(config))

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        self._run.log(dict(scalars), step=step)

    def close(self) -> None:
        self._run.finish()


def make_writers(config: Config, folder: pathlib.Path) -> list[MetricWriter]:
    """The writers that `config.report` asks for.

    Raises:
      ConfigError: a writer's package is not installed.
    """
    writers: list[MetricWriter] = []
    if config.report.tensorboard:
        writers.append(TensorBoardWriter(folder / "tensorboard"))
    if config.report.wandb:
        values = {leaf.key: settings.get(config, leaf.key) for leaf in settings.leaves(Config)}
        writers.append(WandbWriter(config.report.wandb_project, config.run.name, values))
    return writers


def _package(name: str, extra: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        remedy = f"Run `pip install 'locojax[{extra}]'`, or set report.{extra}=false"
        raise ConfigError(f"report.{extra} needs the package {name!r}, which is not installed", remedy=remedy) from None
