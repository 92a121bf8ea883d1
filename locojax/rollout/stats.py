"""What an engine tells of its work: totals, and the tokens of streamed samples as they come."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass
class EngineStats:
    """Totals since the engine was made; subtract two snapshots for a span. Seconds are wall time of this host.

    `row_iterations` counts the alive rows and `padded_row_iterations` all rows of every iteration; their ratio is the
    occupancy.
    """

    num_tokens: int = 0
    num_prompt_tokens: int = 0
    num_iterations: int = 0
    row_iterations: int = 0
    padded_row_iterations: int = 0
    num_compilations: int = 0
    num_preemptions: int = 0
    num_prefix_hits: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    host_seconds: float = 0.0  # of the steps, in neither of the two

    @property
    def tokens_per_second(self) -> float:
        seconds = self.prefill_seconds + self.decode_seconds + self.host_seconds
        return self.num_tokens / seconds if seconds else 0.0

    @property
    def host_ms_per_iteration(self) -> float:
        return 1e3 * self.host_seconds / max(self.num_iterations, 1)

    @property
    def occupancy(self) -> float:
        return self.row_iterations / max(self.padded_row_iterations, 1)


@dataclasses.dataclass(frozen=True)
class TokenEvent:
    """New tokens of a streamed sample, with exactly their bytes; `text` is what those bytes complete of UTF-8.

    Example: TokenEvent("r1", 0, (312, 9), (-0.2, -1.1), b" caf\\xc3", " caf", finished=False)
    """

    request_id: str
    sample_index: int
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    data: bytes
    text: str
    finished: bool
