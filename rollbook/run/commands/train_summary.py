"""The report of a finished run: its results, text for the terminal, and one JSON row."""

import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from rollbook.dashboard.run_metrics import RunSummary
from rollbook.ledger.tools.audit import AuditReport
from rollbook.run.config.run import RunConfig
from rollbook.run.directory import RunDirectory
from rollbook.run.supervision.supervisor import RunEnd, RunOutcome
from rollbook.telemetry.metrics import read_metrics

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_INTERRUPTED = 130


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainReport:
    """How a run ended, and where its results are. Returned by `rollbook.train`."""

    directory: RunDirectory
    config: RunConfig
    """The resolved configuration."""
    outcome: RunOutcome
    audit: AuditReport | None
    """None when the run failed before its ledger existed."""
    summary: RunSummary
    """Reward and solve rate of the first and the last steps, the largest lag, the trainer's utilisation."""
    plots: tuple[Path, ...]
    """PNG files."""

    @property
    def run_dir(self) -> Path:
        return self.directory.path

    @property
    def exit_code(self) -> int:
        if self.outcome.end is RunEnd.INTERRUPTED:
            return EXIT_INTERRUPTED
        is_done = self.outcome.end is not RunEnd.FAILED and self.audit is not None and self.audit.ok
        return EXIT_DONE if is_done else EXIT_FAILED

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """One row per trained step: `step`, `rollout/reward`, `train/loss`, … A table for pandas or matplotlib."""
        # A step that was trained again after a crash has two rows; the last one counts.
        rows = {row["step"]: row for row in read_metrics(self.directory.metrics_file, process="trainer")}
        return [rows[step] for step in sorted(rows)]

    @property
    def model(self) -> Path:
        """The directory of the newest checkpoint's model, or of the initial one. `transformers` and the policy server load it."""
        steps = self.directory.checkpoint_models()
        return steps[max(steps)]

    @property
    def verdict(self) -> str:
        """The summary that is printed at the end of a run."""
        text = io.StringIO()
        print_summary(self, Console(file=text, width=200, color_system=None))
        return text.getvalue().strip()


def summary_row(report: TrainReport) -> dict[str, Any]:
    """`first` and `last` values are means over the first and last tenth of the steps."""
    figures = report.summary
    return {
        "run_dir": str(report.directory.path),
        "end": str(report.outcome.end),
        "steps": figures.steps,
        "seconds": round(report.outcome.seconds, 1),
        "reward_first": _rounded(figures.reward_first),
        "reward_last": _rounded(figures.reward_last),
        "solved_first": _rounded(figures.solved_first),
        "solved_last": _rounded(figures.solved_last),
        "max_lag": figures.max_lag,
        "max_head_offpolicy_versions": report.config.gate.max_head_offpolicy_versions,
        "trainer_utilisation": _rounded(figures.trainer_utilisation),
        "restarts": report.outcome.restarts,
        "audit": "none" if report.audit is None else "ok" if report.audit.ok else "violated",
    }


def print_summary(report: TrainReport, console: Console) -> None:
    figures, outcome = report.summary, report.outcome
    colour = {RunEnd.FINISHED: "green", RunEnd.DRAINED: "yellow", RunEnd.INTERRUPTED: "yellow", RunEnd.FAILED: "red"}[
        outcome.end
    ]
    console.print(
        f"\n[bold {colour}]{outcome.end}[/] after {outcome.seconds:.0f} s and {figures.steps} steps: {escape(outcome.message)}",
        soft_wrap=True,
    )
    if figures.steps:
        reward = _arrow(figures.reward_first, figures.reward_last)
        solved = _arrow(figures.solved_first, figures.solved_last, percent=True)
        console.print(f"  reward  {reward}    solved  {solved}")
        bound = report.config.gate.max_head_offpolicy_versions
        console.print(
            f"  lag     at most {figures.max_lag} of {bound} allowed    trainer busy  {_utilisation(figures.trainer_utilisation)}",
            soft_wrap=True,
        )
    law = report.audit
    if law is None:
        console.print("  audit   none: the run failed, and there is no ledger to read")
    elif law.ok:
        console.print(f"  audit   [green]ok[/]: {escape(law_text(law))}")
    else:
        console.print("  audit   [red]violated[/]:")
        for violation in law.violations:
            console.print(f"    {violation}", markup=False)
    for path in report.plots:
        console.print(f"  plot    {path}", markup=False, soft_wrap=True)
    if outcome.end in (RunEnd.DRAINED, RunEnd.INTERRUPTED, RunEnd.FAILED):
        console.print(f"  resume  rollbook train {report.directory.path}", markup=False, soft_wrap=True)


def law_text(report: AuditReport) -> str:
    """The conservation law with its numbers."""
    parts = [f"{count} {state}" for state, count in report.law.items() if count or state in ("durable", "dropped")]
    reasons = ", ".join(f"{count} {kind}" for kind, count in report.dropped.items())
    return f"{report.opened} opened = {' + '.join(parts)}" + (f" ({reasons})" if reasons else "")


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def _utilisation(ratio: float | None) -> str:
    return "–" if ratio is None else f"{ratio:.0%} of the time; it waited for groups {1 - ratio:.0%}"


def _arrow(first: float | None, last: float | None, *, percent: bool = False) -> str:
    if first is None or last is None:
        return "–"
    return f"{first:.0%} → {last:.0%}" if percent else f"{first:.3f} → {last:.3f}"
