"""Mastery over time, as a curriculum wrote it down: one point a line of `mastery.jsonl`. Survives a missing file and torn lines."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollbook.dashboard.queries import is_number
from rollbook.dashboard.tail import JsonTail

MASTERY_FILE = "mastery.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class MasteryPoint:
    """One tier at one moment."""

    draws: int
    """Handed out in the whole run so far."""
    is_open: bool
    graduated_share: float
    """Graduated tasks of all tasks of the tier."""
    rate: float | None
    """Mean success rate of the tasks that were drawn."""


def read_mastery(run_dir: Path) -> dict[str, list[MasteryPoint]]:
    """The points of each tier by draws, easiest tier first. Empty for a run without a curriculum."""
    tiers: dict[str, dict[int, MasteryPoint]] = {}
    for row in JsonTail(run_dir / MASTERY_FILE).poll():
        draws = row.get("draws")
        listed = row.get("tiers")
        if isinstance(draws, int) and isinstance(listed, list):
            for tier in listed:
                if isinstance(tier, Mapping) and isinstance(tier.get("name"), str):
                    tiers.setdefault(tier["name"], {})[draws] = _point(draws, tier)
    return {name: [points[draws] for draws in sorted(points)] for name, points in tiers.items()}


def _point(draws: int, tier: Mapping[str, Any]) -> MasteryPoint:
    tasks, graduated, rate = tier.get("tasks"), tier.get("graduated"), tier.get("rate")
    return MasteryPoint(
        draws=draws,
        is_open=bool(tier.get("open")),
        graduated_share=graduated / tasks if is_number(tasks) and is_number(graduated) and tasks > 0 else 0.0,
        rate=float(rate) if is_number(rate) else None,
    )
