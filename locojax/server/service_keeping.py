"""What models have learnt is saved when the server is told to stop: a spot machine's notice, a restart."""

from __future__ import annotations

import asyncio
import logging

from locojax.hosts.protocol import SaveState
from locojax.server.checkpoints import TinkerPath
from locojax.server.service_checkpoints import CheckpointDesk
from locojax.server.service_engine import EngineDesk, EngineFailed
from locojax.server.service_lifecycle import Models
from locojax.server.service_models import Line

log = logging.getLogger(__name__)

KEPT_FOR = 30 * 86400
"""Seconds: nobody asked for these checkpoints, so they don't stay for ever."""


class Keeper:
    """Saves models as training checkpoints `weights/interrupted-<the seq_id awaited next>`."""

    def __init__(self, engine: EngineDesk, models: Models, checkpoints: CheckpointDesk):
        self._engine, self._models, self._checkpoints = engine, models, checkpoints

    async def keep(self, seconds: float) -> list[str]:
        """Saves every model that took a step since it was last saved; returns the checkpoints' paths.

        Each after what its clients have submitted. What isn't written after `seconds` is given up, and named.
        """
        lines = [line for line in self._models.lines() if line.model.state == "live" and line.unsaved]
        if not lines or not self._engine.link.ready:
            for line in lines:
                log.warning("%s is not kept: the engine does not answer", line.model.model_id)
            return []
        log.info("Saving %d models before the end, for up to %g s", len(lines), seconds)
        tasks = {asyncio.create_task(self._keep(line)): line for line in lines}
        done, late = await asyncio.wait(tasks, timeout=seconds)
        for task in late:
            task.cancel()
            log.warning("%s is not kept: it was not written within %g s", tasks[task].model.model_id, seconds)
        await asyncio.gather(*late, return_exceptions=True)
        kept = []
        for task in done:
            try:
                path = task.result()
            except (EngineFailed, OSError) as error:
                log.warning("%s is not kept: %s", tasks[task].model.model_id, error)
                continue
            log.info("Kept %s as %s", tasks[task].model.model_id, path)
            kept.append(path)
        return kept

    async def _keep(self, line: Line) -> str:
        model = line.model
        path = TinkerPath(model.model_id, "weights", f"interrupted-{model.next_seq}")
        self._checkpoints.reserve(path, overwrite=True)
        try:
            directory = self._checkpoints.new_directory()
            await self._engine.call(SaveState(model.model_id, directory))
            await self._checkpoints.keep(path, directory, model, KEPT_FOR, None)
        finally:
            self._checkpoints.release(path)
        return str(path)
