"""What a sink can show: metrics, rollouts, spans. A sink overrides what its library supports."""

from collections.abc import Sequence
from typing import Any, ClassVar

from rollbook.telemetry.spans import Span

ROLLOUT_COLUMNS = ("step", "group", "task", "sample", "reward", "advantage", "turns", "tokens", "end", "text")
"""The columns of `rollouts.jsonl`, in order."""

Row = dict[str, Any]


class Sink:
    shows_spans: ClassVar[bool] = False
    """Whether the span files are read for this sink. They are large."""

    def write(self, values: dict[str, float], *, process: str, step: int, at: float) -> None:
        """Show metrics of one process, at trainer step `step`."""

    def write_rollouts(self, rows: Sequence[Row], *, step: int) -> None:
        """Show rollouts of one step. Those of earlier steps stay."""

    def write_spans(self, spans: Sequence[Span]) -> None:
        """Show finished spans."""

    def close(self) -> None:
        """Write what is buffered."""
