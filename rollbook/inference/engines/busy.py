"""Busy periods of an engine as spans, so that generation can be drawn against training.

A period is contiguous time with running requests. It is cut at idle gaps, at weight updates, and after a second, so that a span has
one publication and a live view does not lag.
"""

import time
from collections.abc import Callable

from rollbook.telemetry.spans import SpanRecorder

IDLE_GAP_S = 0.02
LONGEST_S = 1.0


class BusyPeriods:
    """Fed by the engine after every step. Without a recorder it only adds up busy seconds."""

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

    def step(self, began: float, ended: float, *, requests: int, tokens: int, publication: int) -> None:
        """One step took from `began` to `ended` (wall seconds), finished `requests` and sampled `tokens`."""
        self.busy_s += max(0.0, ended - began)
        if self._spans is None:
            return
        if self._start is not None and (began - self._end >= IDLE_GAP_S or publication != self._publication):
            self.cut()
        if self._start is None:
            self._start, self._publication = began, publication
        self._end = ended
        self._requests += requests
        self._tokens += tokens
        if ended - self._start >= LONGEST_S:
            self.cut()

    def cut(self) -> None:
        """End the current period, if there is one."""
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

    def updated(self, began: float, *, publication: int, step: int) -> None:
        """Weights were applied, from `began` until now."""
        self.cut()
        if self._spans is not None:
            self._spans.record("policy.update_weights", began, self._wall(), publication=publication, step=step)
