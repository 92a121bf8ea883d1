"""The one error that the service answers requests with."""

from __future__ import annotations

from locojax.errors import LocoError


class ServiceError(LocoError):
    """A request is refused: `status` for HTTP, the text for the reader (`{"detail": str(error)}`)."""

    exit_code = 2

    def __init__(
        self,
        status: int,
        problem: str,
        *,
        got: object = None,
        expected: object = None,
        remedy: str | None = None,
    ):
        super().__init__(problem, got=got, expected=expected, remedy=remedy)
        self.status = status

    @property
    def detail(self) -> str:
        return str(self)
