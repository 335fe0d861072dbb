"""The report of a study of recorded runs: what each loss and advantage would have learned from the same batches.

Nothing is generated, so a replayed policy is judged by the samples of the recorded one: to first order its gain is the mean of
A (log pi - log mu), with the recorded advantages, on batches that it has not trained yet. That holds as long as both policies are
close: cells are compared up to the last step at which all of them have an effective sample size of at least `MIN_ESS`.
"""

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rollbook.commands.training.study_report import EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED
from rollbook.contracts.plugin import load_on_demand
from rollbook.dashboard.study import Estimate, estimate
from rollbook.run.config.study import Cell, Study
from rollbook.run.directory import write_json

MIN_ESS = 0.5
TENTH = 10
HEADINGS = ("cell", "runs", "gain", "trusted steps", "KL to sampler", "ESS", "entropy", "gradient norm", "clipped")
Lines = Mapping[str, Sequence[float | None]]
"""Measure to its values by step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedCell:
    """One combination of settings, on all recorded runs that were replayed with it. Means are over the tenth of the steps that ends
    at the last compared one."""

    cell: str
    runs: int
    gain: Estimate | None
    """At equal steps, with its interval over runs."""
    trusted_steps: int
    """Steps before the effective sample size fell below `MIN_ESS`, in the run where that happened first."""
    mean_kl: float | None
    ess: float | None
    entropy: float | None
    grad_norm: float | None
    clipped: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayStudyReport:
    """What a study of recorded runs has found so far."""

    directory: Path
    cells: tuple[ReplayedCell, ...]
    steps: int | None
    """The last compared step. None: no replay has ended."""
    unfinished: tuple[Mapping[str, str], ...]
    files: tuple[Path, ...] = ()
    is_interrupted: bool = False

    @property
    def measure(self) -> str:
        return "gain over the sampler"

    @property
    def headings(self) -> tuple[str, ...]:
        return HEADINGS

    @property
    def exit_code(self) -> int:
        if self.is_interrupted:
            return EXIT_INTERRUPTED
        return EXIT_FAILED if any(one["end"] == "failed" for one in self.unfinished) else EXIT_DONE

    def table(self) -> list[tuple[str, ...]]:
        """One row of strings per cell with a finished replay, the largest gain first."""
        ranked = sorted(self.cells, key=lambda cell: -cell.gain.mean if cell.gain else float("inf"))
        return [
            (
                cell.cell,
                str(cell.runs),
                _gain_text(cell.gain),
                str(cell.trusted_steps),
                *(_text(value) for value in (cell.mean_kl, cell.ess, cell.entropy, cell.grad_norm, cell.clipped)),
            )
            for cell in ranked
        ]

    def row(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "directory": str(self.directory),
            "steps": self.steps,
            "cells": [asdict(cell) for cell in self.cells],
            "unfinished": [dict(one) for one in self.unfinished],
        }


def write_replay_report(
    plan: Study, directory: Path, results: Mapping[Cell, Mapping[str, Any] | None], *, is_interrupted: bool = False
) -> ReplayStudyReport:
    """`results`: how the replay of each cell ended, with its curves."""
    found: dict[str, list[Lines]] = {}
    unfinished = []
    for cell, result in results.items():
        end = "missing" if result is None else str(result["end"])
        if result is not None and end == "finished":
            found.setdefault(cell.name, []).append(result["lines"])
        else:
            cause = "" if result is None else str(result.get("message", ""))
            unfinished.append({"cell": cell.name, "run": str(cell.replayed), "end": end, "cause": cause})
    steps = min((trusted_steps(lines) for runs in found.values() for lines in runs), default=None)
    cells = tuple(_compared(name, runs, steps or 0) for name, runs in found.items())
    out = directory / "report"
    out.mkdir(parents=True, exist_ok=True)
    files = [out / "report.md", out / "results.json"]
    if found and importlib.util.find_spec("matplotlib") is not None:
        # matplotlib is optional, and slow to import.
        draw = load_on_demand("rollbook.dashboard.plots").draw_comparison
        files.append(draw(out / "curves.svg", f"{plan.name}: means over the recorded runs", _panels(found)))
    report = ReplayStudyReport(
        directory=directory,
        cells=cells,
        steps=steps,
        unfinished=tuple(unfinished),
        files=tuple(files),
        is_interrupted=is_interrupted,
    )
    write_json(out / "results.json", {**report.row(), "lines": found})
    files[0].write_text(_page(plan, report), encoding="utf-8")
    return report


def trusted_steps(lines: Lines) -> int:
    """Steps before the first one whose effective sample size is below `MIN_ESS`."""
    ess = lines["train/ess"]
    return next((at for at, value in enumerate(ess) if value is not None and value < MIN_ESS), len(ess))


def _compared(name: str, runs: Sequence[Lines], steps: int) -> ReplayedCell:
    def last(lines: Lines, measure: str) -> list[float]:
        window = lines[measure][max(0, steps - max(1, steps // TENTH)) : steps]
        return [value for value in window if value is not None]

    def mean(measure: str) -> float | None:
        values = [value for lines in runs for value in last(lines, measure)]
        return sum(values) / len(values) if values else None

    gains = [sum(values) / len(values) for lines in runs if (values := last(lines, "gain"))]
    return ReplayedCell(
        cell=name,
        runs=len(runs),
        gain=estimate(gains) if gains else None,
        trusted_steps=min(map(trusted_steps, runs)),
        mean_kl=mean("train/mean_kl"),
        ess=mean("train/ess"),
        entropy=mean("train/entropy"),
        grad_norm=mean("train/grad_norm"),
        clipped=mean("train/ppo_clip_frac"),
    )


def _panels(found: Mapping[str, Sequence[Lines]]) -> dict[str, dict[str, list[float | None]]]:
    """For each measure the mean over runs of each cell, as far as its shortest run goes."""
    titles = {
        "gain": "gain over the sampler",
        "train/ess": "effective sample size",
        "train/mean_kl": "KL to the sampler",
    }
    panels: dict[str, dict[str, list[float | None]]] = {}
    for measure, title in titles.items():
        panels[title] = {}
        for name, runs in found.items():
            at_steps = zip(*(lines[measure] for lines in runs), strict=False)
            known = ([value for value in values if value is not None] for values in at_steps)
            panels[title][name] = [sum(values) / len(values) if values else None for values in known]
    return panels


def _page(plan: Study, report: ReplayStudyReport) -> str:
    runs = dict.fromkeys(str(cell.replayed) for cell in plan.cells)
    lines = [f"# {plan.name}", "", f"Recorded runs: {', '.join(runs)}.", ""]
    if report.steps is not None:
        lines += [
            f"Compared at step {report.steps:,}, the last one at which every cell has an effective sample size of at least"
            f" {MIN_ESS:g}; means over the tenth of the steps that ends there. Gain: A (log π − log μ) with the recorded"
            " advantages, on batches before they are trained; with several runs its 95 % bootstrap interval over them. Trusted"
            f" steps: those before the effective sample size of the cell fell below {MIN_ESS:g}.",
            "",
        ]
    lines += [f"| {' | '.join(HEADINGS)} |", f"|{'---|' * len(HEADINGS)}"]
    lines += [f"| {' | '.join(row)} |" for row in report.table()]
    if report.unfinished:
        lines += ["", "Not finished, and not in the means:", ""]
        lines += [f"- {one['cell']} on {one['run']}: {one['end']} {one['cause']}".rstrip() for one in report.unfinished]
    lines += [""] + [f"![{path.stem}]({path.name})" for path in report.files if path.suffix == ".svg"]
    return "\n".join(lines) + "\n"


def _gain_text(value: Estimate | None) -> str:
    if value is None:
        return "–"
    return _text(value.mean) if value.low is None else f"{_text(value.mean)} [{_text(value.low)} – {_text(value.high)}]"


def _text(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"
