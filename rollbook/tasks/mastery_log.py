"""Writes mastery over time to `mastery.jsonl`, and the tier of each task to `tiers.json`. The curriculum never reads them."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rollbook.concurrency.clock import Clock, SystemClock
from rollbook.telemetry.events import FailureReport

POINTS_PER_DOUBLING = 200
"""Lines written while the number of draws doubles: enough for a smooth curve."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TierView:
    name: str
    is_open: bool
    num_tasks: int
    num_drawn: int
    """Tasks drawn at least once."""
    num_graduated: int
    rate: float | None
    """Mean decayed success rate of the drawn tasks; None before the first draw."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MasteryView:
    draws: int
    """Draws taken so far."""
    tiers: tuple[TierView, ...]
    """Easiest first."""


class MasteryLog:
    """Appends views to a file. A failed write is reported once and never stops a run."""

    def __init__(self, path: Path, *, clock: Clock | None = None) -> None:
        self._path = path
        self._clock = clock or SystemClock()
        self._written_at: int | None = None
        self._failure = FailureReport(f"mastery is not written to {path}")
        path.parent.mkdir(parents=True, exist_ok=True)

    def write_tiers(self, tier_of: Mapping[str, str]) -> None:
        """The tier of each task."""
        file = self._path.with_name("tiers.json")
        try:
            draft = file.with_suffix(".draft")
            draft.write_text(json.dumps(dict(tier_of)), encoding="utf-8")
            draft.replace(file)
        except OSError as error:
            self._failure.report(error)

    def is_due(self, draws: int) -> bool:
        """Less often the longer the run is, so that the file stays small."""
        return self._written_at is None or draws - self._written_at >= max(1, draws // POINTS_PER_DOUBLING)

    def write(self, view: MasteryView) -> None:
        self._written_at = view.draws
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
            self._failure.report(error)
