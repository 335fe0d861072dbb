"""The report of a study: a table, the numbers as JSON, and two SVG pictures."""

import dataclasses
import importlib.util
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rollbook.contracts.plugin import load_on_demand
from rollbook.dashboard.study import CellResult, Estimate, StudyResults, StudyRun, compare, read_run
from rollbook.run.config.study import Cell, Study
from rollbook.run.directory import write_json

EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED = 0, 1, 130
MEASURES = {
    "held_out_solved": "solved held-out tasks",
    "held_out_reward": "reward of held-out tasks",
    "reward": "reward of the trained batches",
}
HEADINGS = (
    "cell",
    "seeds",
    "at equal samples",
    "at equal time",
    "best",
    "s per step",
    "lag",
    "ESS",
    "entropy",
    "problems",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyReport:
    """What a study has found so far."""

    directory: Path
    results: StudyResults
    files: tuple[Path, ...]
    is_interrupted: bool = False

    @property
    def unfinished(self) -> tuple[StudyRun, ...]:
        return tuple(run for run in self.results.runs if run.end != "finished")

    @property
    def exit_code(self) -> int:
        if self.is_interrupted:
            return EXIT_INTERRUPTED
        return EXIT_FAILED if any(run.end == "failed" for run in self.results.runs) else EXIT_DONE

    @property
    def measure(self) -> str:
        return self.results.measure

    @property
    def headings(self) -> tuple[str, ...]:
        return HEADINGS

    def table(self) -> list[tuple[str, ...]]:
        return table(self.results)

    def interrupted(self) -> "StudyReport":
        return dataclasses.replace(self, is_interrupted=True)

    def row(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "directory": str(self.directory),
            "measure": self.results.measure,
            "samples": self.results.samples,
            "seconds": None if self.results.seconds is None else round(self.results.seconds, 1),
            "cells": [
                {
                    "cell": cell.cell,
                    "seeds": [run.seed for run in cell.runs],
                    **{
                        name: None if value is None else asdict(value)
                        for name, value in (
                            ("at_samples", cell.at_samples),
                            ("at_seconds", cell.at_seconds),
                            ("best", cell.best),
                        )
                    },
                }
                for cell in self.results.cells
            ],
            "unfinished": [{"cell": run.cell, "seed": run.seed, "end": run.end} for run in self.unfinished],
        }


def write_report(
    plan: Study, directory: Path, cells: Mapping[Cell, tuple[Path, Mapping[str, Any] | None]]
) -> StudyReport:
    """`cells`: the run directory of each cell, and how its run ended."""
    results = _results(cells, plan.measure)
    if plan.measure == "held_out_solved" and not any(run.curve for run in results.runs):
        # The rewards of these tasks do not say which are solved.
        results = _results(cells, "held_out_reward")
    out = directory / "report"
    out.mkdir(parents=True, exist_ok=True)
    report = StudyReport(directory=directory, results=results, files=())
    write_json(out / "results.json", {**report.row(), "runs": [asdict(run) for run in results.runs]})
    drawn: list[Path] = []
    if importlib.util.find_spec("matplotlib") is not None:
        # matplotlib is optional, and slow to import.
        drawn = load_on_demand("rollbook.dashboard.plots").draw_study(
            out, plan.name, MEASURES[results.measure], results
        )
    (out / "report.md").write_text(_page(plan, results, drawn), encoding="utf-8")
    return dataclasses.replace(report, files=(out / "report.md", out / "results.json", *drawn))


def _results(cells: Mapping[Cell, tuple[Path, Mapping[str, Any] | None]], measure: str) -> StudyResults:
    runs = []
    for cell, (run_dir, result) in cells.items():
        end = str(result["end"]) if result is not None else "started" if run_dir.exists() else "missing"
        run = StudyRun(cell=cell.name, labels=cell.labels, seed=cell.seed, end=end)
        runs.append(read_run(run_dir, run, measure=measure))
    return compare(runs, measure=measure)


def table(results: StudyResults) -> list[tuple[str, ...]]:
    """One row of strings per cell with a finished run, best first."""
    is_share = results.measure == "held_out_solved"
    ranked = sorted(
        (cell for cell in results.cells if cell.runs),
        key=lambda cell: -cell.at_samples.mean if cell.at_samples else 1.0,
    )
    return [
        (
            cell.cell,
            str(len(cell.runs)),
            *(_text(value, is_share=is_share) for value in (cell.at_samples, cell.at_seconds, cell.best)),
            _mean(cell, "seconds_per_step", 2),
            str(max((run.max_lag for run in cell.runs), default="–")),
            _mean(cell, "ess", 2),
            _mean(cell, "entropy", 2),
            "; ".join(dict.fromkeys(problem for run in cell.runs for problem in run.problems)),
        )
        for cell in ranked
    ]


def _page(plan: Study, results: StudyResults, drawn: list[Path]) -> str:
    lines = [f"# {plan.name}", ""]
    if results.samples is not None and results.seconds is not None:
        lines += [
            f"Compared: {MEASURES[results.measure]}, after {results.samples:,.0f} trained samples and after "
            f"{results.seconds:,.0f} s of training. Means over seeds with 95 % bootstrap intervals. ESS: the lowest effective "
            "sample size of the weights old / sampled.",
            "",
        ]
    lines += [f"| {' | '.join(HEADINGS)} |", f"|{'---|' * len(HEADINGS)}"]
    lines += [f"| {' | '.join(row)} |" for row in table(results)]
    if stopped := [run for run in results.runs if run.end not in ("finished", "missing")]:
        lines += ["", "Not finished, and not in the means:", ""]
        lines += [f"- {run.cell}, seed {run.seed}: {run.end}, {run.steps} steps" for run in stopped]
    if missing := sum(run.end == "missing" for run in results.runs):
        lines += ["", f"Not started: {missing} of {len(results.runs)} runs."]
    lines += [""] + [f"![{path.stem}]({path.name})" for path in drawn]
    return "\n".join(lines) + "\n"


def _text(value: Estimate | None, *, is_share: bool) -> str:
    if value is None:
        return "–"
    mean, low, high = (
        None if one is None else f"{one:.1%}" if is_share else f"{one:.3f}"
        for one in (value.mean, value.low, value.high)
    )
    return f"{mean}" if low is None else f"{mean} [{low}–{high}]"


def _mean(cell: CellResult, name: str, digits: int) -> str:
    known = [value for run in cell.runs if (value := getattr(run, name)) is not None]
    return f"{sum(known) / len(known):.{digits}f}" if known else "–"
