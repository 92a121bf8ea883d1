"""The programs that one trainer has had compiled, and how many it may."""

from __future__ import annotations

import dataclasses

import jax

from locojax.errors import CapacityError
from locojax.training.losses import Options
from locojax.training.microbatch import Widths


@dataclasses.dataclass(frozen=True)
class Asked:
    """What tells one program of a trainer from another, besides its rows' shape, which never changes.

    Attributes:
      verb: what is computed, in words. loss: of what, and settings: those of its settings that a program depends on.
      num_targets: targets a position. inputs: the loss's inputs that the data have.
      structure: of the loss's settings, as jax tells programs apart by it.
    """

    verb: str
    loss: str
    settings: tuple[str, ...]
    num_targets: int
    inputs: tuple[str, ...]
    structure: jax.tree_util.PyTreeDef

    @classmethod
    def of(cls, verb: str, loss: str, options: Options, widths: Widths) -> Asked:
        given = []
        for field in dataclasses.fields(options):
            value = getattr(options, field.name)
            if field.metadata.get("static") and value != field.default:
                given.append(f"{field.name} {value}")
            elif field.default is None and value is not None:
                given.append(field.name)
        names = tuple(sorted(widths.inputs))
        return cls(verb, loss, tuple(given), widths.num_targets, names, jax.tree.structure(options))

    def __str__(self) -> str:
        settings = f" with {', '.join(self.settings)}" if self.settings else ""
        targets = "1 target" if self.num_targets == 1 else f"{self.num_targets} targets"
        inputs = f", inputs {', '.join(self.inputs)}" if self.inputs else ""
        return f"{self.verb} of {self.loss}{settings}, {targets} a position{inputs}"


class ProgramBudget:
    """Counts the programs that a trainer's calls have asked for, and refuses the one too many.

    Each is compiled once, for seconds to minutes, and stays in memory. A run needs a few; data that ask for ever more
    are a mistake that would otherwise show as a run that is slow, and then out of memory.

    Args:
      max_programs: see `TrainerSettings.max_programs`.
      shape: (rows, tokens of a row) that all of them have, on each device.
    """

    def __init__(self, max_programs: int, shape: tuple[int, int]):
        self._max_programs, self._shape = max_programs, shape
        self._asked: dict[Asked, None] = {}  # in the order in which they came

    @property
    def num_programs(self) -> int:
        return len(self._asked)

    def admit(self, asked: Asked) -> None:
        """Counts a call's program, if it is a new one.

        Raises:
          CapacityError: it is one more than the budget has; names those that there are.
        """
        if asked in self._asked:
            return
        if len(self._asked) >= self._max_programs:
            rows, row_tokens = self._shape
            one = self._max_programs == 1
            raise CapacityError(
                f"The call needs another program than the {'one' if one else len(self._asked)} that this trainer has "
                f"for its rows ({rows} x {row_tokens} tokens), which {'is' if one else 'are'} all that its budget "
                "allows",
                got=str(asked),
                expected="one of: " + "; ".join(map(str, self._asked)),
                remedy="Give all data of a loss the same inputs and number of targets, or raise the budget "
                "(training.max_programs)",
            )
        self._asked[asked] = None
