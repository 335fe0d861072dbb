"""Mastery over time, for people: one line of `mastery.jsonl` now and then. Shown and plotted, never read back by the curriculum."""

import json
import logging
from dataclasses import dataclass
from pathlib import Path

from rollbook.concurrency.clock import Clock, SystemClock

DRAWN_POINTS = 200
"""Lines a doubling of the run adds, roughly: enough for a smooth curve."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TierView:
    name: str
    is_open: bool
    num_tasks: int
    num_drawn: int
    """Tasks that were drawn at least once."""
    num_graduated: int
    rate: float | None
    """Mean decayed success rate of the drawn tasks; None before the first draw."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MasteryView:
    draws: int
    """Handed out so far."""
    tiers: tuple[TierView, ...]
    """Easiest first."""


class MasteryLog:
    """Appends what it is told. A disk that refuses is reported once and never stops a run."""

    def __init__(self, path: Path, *, clock: Clock | None = None) -> None:
        self._path = path
        self._clock = clock or SystemClock()
        self._told_at: int | None = None
        self._has_failed = False
        path.parent.mkdir(parents=True, exist_ok=True)

    def is_due(self, draws: int) -> bool:
        """Ever more seldom, so that the file stays small however long the run: a picture cannot show more."""
        return self._told_at is None or draws - self._told_at >= max(1, draws // DRAWN_POINTS)

    def tell(self, view: MasteryView) -> None:
        self._told_at = view.draws
        row = {
            "time": round(self._clock.wall(), 4),
            "draws": view.draws,
            "tiers": [
                {
                    "name": tier.name,
                    "open": tier.is_open,
                    "tasks": tier.num_tasks,
                    "drawn": tier.num_drawn,
                    "graduated": tier.num_graduated,
                    "rate": None if tier.rate is None else round(tier.rate, 4),
                }
                for tier in view.tiers
            ],
        }
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        except OSError as error:
            if not self._has_failed:
                self._has_failed = True
                logging.getLogger("rollbook.tasks").warning("mastery is not written to %s: %s", self._path, error)
