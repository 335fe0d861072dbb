"""Records the busy periods of an engine as spans, so that generation can be plotted against training.

A period is contiguous time with running requests. It ends at idle gaps, at weight updates, and after a second, so that a span has
one publication and a live view is up to date.
"""

import time
from collections.abc import Callable

from rollbook.telemetry.spans import SpanRecorder

IDLE_GAP_S = 0.02
MAX_PERIOD_S = 1.0


class BusyPeriods:
    """Updated by the engine after every step. Without a recorder it only sums the busy seconds."""

    def __init__(self, spans: SpanRecorder | None, *, wall: Callable[[], float] = time.time) -> None:
        self._spans = spans
        self._wall = wall
        self.busy_s = 0.0
        self._start: float | None = None
        self._end = 0.0
        self._requests = 0
        self._tokens = 0
        self._publication = -1

    @property
    def is_open(self) -> bool:
        return self._start is not None

    def step(self, started: float, ended: float, *, requests: int, tokens: int, publication: int) -> None:
        """Add a step: `started` and `ended` in wall seconds, and the requests it finished and tokens it sampled."""
        self.busy_s += max(0.0, ended - started)
        if self._spans is None:
            return
        if self._start is not None and (started - self._end >= IDLE_GAP_S or publication != self._publication):
            self.end_period()
        if self._start is None:
            self._start, self._publication = started, publication
        self._end = ended
        self._requests += requests
        self._tokens += tokens
        if ended - self._start >= MAX_PERIOD_S:
            self.end_period()

    def end_period(self) -> None:
        if self._start is None or self._spans is None:
            return
        self._spans.record(
            "policy.generate",
            self._start,
            self._end,
            requests=self._requests,
            tokens=self._tokens,
            publication=self._publication,
        )
        self._start, self._requests, self._tokens = None, 0, 0

    def updated(self, started: float, *, publication: int, step: int) -> None:
        """Record a weight update that started at `started` and ended now."""
        self.end_period()
        if self._spans is not None:
            self._spans.record("policy.update_weights", started, self._wall(), publication=publication, step=step)
