"""The report of a finished run: its results, text for the terminal, and one JSON row."""

import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from rollbook.contracts.admission import AuditReport
from rollbook.contracts.user_errors import indented
from rollbook.dashboard.run_metrics import Change, EvaluationPoint, RunSummary, tenth_means
from rollbook.dashboard.terminal import duration, evaluation_text, headline, percent, small_number
from rollbook.rollout.settings import judge_key, score_key
from rollbook.run.config.run import RunConfig
from rollbook.run.directory import RunDirectory
from rollbook.run.held_out import recorded_held_out
from rollbook.run.reader import StoredEpisodes
from rollbook.run.supervision.supervisor import RunEnd, RunOutcome
from rollbook.telemetry.metrics import read_metrics

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_INTERRUPTED = 130
JUDGE_COUNTS = ("requests", "failed", "cost")
BUSY_ENOUGH = 0.7
"""Below this utilisation of the trainer, the summary says how to find better settings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainReport:
    """How a run ended, and where its results are. Returned by `rollbook.train`."""

    directory: RunDirectory
    config: RunConfig
    """The resolved configuration."""
    outcome: RunOutcome
    audit: AuditReport | None
    """None when a failed run has no ledger that can be read, or a run was stopped before it had one."""
    summary: RunSummary
    """Means of the first and the last steps, evaluations, shares of lost episodes and groups, the largest lag."""
    plots: tuple[Path, ...]
    """PNG files."""
    stored: StoredEpisodes | None = None
    """Episodes by the ledger; None: not counted, because the run is long or has no ledger that can be read."""
    steps_before: int = 0
    """Steps that earlier sessions of this run trained. The seconds of `outcome` are those of this session."""

    @property
    def run_dir(self) -> Path:
        return self.directory.path

    @property
    def exit_code(self) -> int:
        if self.outcome.end is RunEnd.INTERRUPTED:
            return EXIT_INTERRUPTED
        is_done = self.outcome.end is not RunEnd.FAILED and (self.audit is None or self.audit.ok)
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
    """`first` and `last` values are means over the first and last tenth of the steps of the run."""
    figures, last = report.summary, _last_evaluation(report)
    return {
        "run_dir": str(report.directory.path),
        "end": str(report.outcome.end),
        "steps": figures.steps,
        "seconds": round(report.outcome.seconds, 1),
        "steps_in_these_seconds": figures.steps - report.steps_before,
        "reward_first": _rounded(figures.reward.first),
        "reward_last": _rounded(figures.reward.last),
        "solved_first": _rounded(figures.solved.first),
        "solved_last": _rounded(figures.solved.last),
        "held_out_step": None if last is None else last.step,
        "held_out_solved": None if last is None else _rounded(last.solved),
        "held_out_reward": None if last is None else _rounded(last.reward),
        "response_tokens": _rounded(figures.response_tokens.last),
        "truncated": _rounded(figures.truncated.last),
        "unscorable": _rounded(figures.totals.unscorable_share),
        "filtered": _rounded(figures.totals.filtered_share),
        "entropy": _rounded(figures.entropy.last),
        "kl": _rounded(figures.kl.last),
        "max_lag": figures.max_lag,
        "max_head_offpolicy_versions": report.config.gate.max_head_offpolicy_versions,
        "trainer_utilisation": _rounded(figures.trainer_utilisation),
        "restarts": report.outcome.restarts,
        "worker_deaths": round(figures.totals.worker_deaths),
        "problems": [*figures.problems, *report.outcome.problems],
        "audit": "none" if report.audit is None else "ok" if report.audit.ok else "violated",
    }


def print_summary(report: TrainReport, console: Console) -> None:
    figures, outcome = report.summary, report.outcome
    colour = {RunEnd.FINISHED: "green", RunEnd.DRAINED: "yellow", RunEnd.INTERRUPTED: "yellow", RunEnd.FAILED: "red"}[
        outcome.end
    ]
    steps = f"{figures.steps - report.steps_before} steps in {duration(outcome.seconds)}"
    if report.steps_before:
        steps += f", {figures.steps} steps in all"
    console.print(f"\n[bold {colour}]{outcome.end}[/]: {steps}. {escape(outcome.message)}", soft_wrap=True)
    for label, text in _lines(report):
        console.print(f"  {label:<11}{text}", soft_wrap=True)
    law = report.audit
    if law is not None and not law.ok:
        for violation in law.violations:
            console.print(f"    {violation}", markup=False)
    if (cause := report.directory.first_failure()) is not None:
        if cause.splitlines()[0] not in outcome.message:
            console.print(indented(f"first failed episode: {cause}", "  "), markup=False, soft_wrap=True)
        console.print(f"  debug      rollbook debug {report.directory.path}", markup=False, soft_wrap=True)
    for path in report.plots:
        console.print(f"  plot       {path}", markup=False, soft_wrap=True)
    if outcome.end is RunEnd.FAILED and not figures.steps:
        console.print("  This run trained no step: correct the cause and start a new run.")
    elif outcome.end is not RunEnd.FINISHED:
        console.print(f"  resume     rollbook train {report.directory.path}", markup=False, soft_wrap=True)


def _lines(report: TrainReport) -> list[tuple[str, str]]:
    """Label and text, in rich's markup."""
    figures, totals, law = report.summary, report.summary.totals, report.audit
    lines: list[tuple[str, str]] = []
    if figures.steps:
        divergence = "the initial policy" if figures.has_reference_kl else "the sampler"
        bound = report.config.gate.max_head_offpolicy_versions
        lines += [
            ("reward", f"{_arrow(figures.reward)}    {_solved(figures.solved)}"),
            *_scores(report),
            ("held out", escape(_held_out(report))),
            (
                "response",
                f"{_arrow(figures.response_tokens, digits=0)} tokens; truncated {percent(figures.truncated.last)} at the end; "
                f"unscorable {_unscorable(report)}",
            ),
            ("entropy", f"{_arrow(figures.entropy, digits=2)}    KL to {divergence} {small_number(figures.kl.last)}"),
            (
                "lag",
                f"at most {figures.max_lag} of {bound} allowed    trainer busy  {_utilisation(figures.trainer_utilisation)}",
            ),
        ]
    if figures.trainer_utilisation is not None and figures.trainer_utilisation < BUSY_ENOUGH:
        path = report.directory.path
        lines.append(
            (
                "faster",
                escape(f"rollbook simulate {path} (recommends sizes, batch policy)"),
            )
        )
    lines += [("problem", f"[yellow]{escape(problem)}[/]") for problem in (*figures.problems, *report.outcome.problems)]
    if report.outcome.restarts or totals.worker_deaths:
        lines.append(
            ("deaths", f"{totals.worker_deaths:.0f} of workers; {report.outcome.restarts} restarts of other processes")
        )
    if law is None:
        is_failed = report.outcome.end is RunEnd.FAILED
        cause = "the run failed, and there is no ledger to read" if is_failed else "the run was stopped before it began"
        lines.append(("audit", f"none: {cause}"))
    else:
        verdict = f"[green]ok[/]: {escape(law_text(law))}" if law.ok else "[red]violated[/]:"
        lines.append(("audit", verdict))
    return lines


def _scores(report: TrainReport) -> list[tuple[str, str]]:
    """The values of several reward functions, the requests of judges, and the distance to the teacher."""
    functions = report.config.rollout.rewards.functions
    rows = read_metrics(report.directory.metrics_file, process="rollout")
    lines: list[tuple[str, str]] = []
    known = {name: [value for row in rows if (value := row.get(score_key(name))) is not None] for name in functions}
    if len(functions) > 1 and any(known.values()):
        parts = [f"{escape(name)} {_arrow(tenth_means(values))}" for name, values in known.items() if values]
        lines.append(("functions", "    ".join(parts)))
    if any(function.judge for function in functions.values()):
        requests, failed, cost = (sum(row.get(judge_key(name)) or 0.0 for row in rows) for name in JUDGE_COUNTS)
        lines.append(("judges", f"{requests:.0f} requests, {failed:.0f} failed, cost {cost:.4g}"))
    if report.config.rollout.teacher:
        distances = [value for row in report.metrics if (value := row.get("train/teacher_kl")) is not None]
        distance = tenth_means(distances)
        if distance.last is not None:
            lines.append(("teacher", f"distance {_arrow(distance)} nats"))
    return lines


def _unscorable(report: TrainReport) -> str:
    """By the ledger where it has more: a killed dispatcher loses the episodes that it counted last."""
    totals, stored = report.summary.totals, report.stored
    if stored is not None and stored.played > totals.episodes:
        return f"{percent(stored.unscorable / stored.played)} of {stored.played} episodes"
    return f"{percent(totals.unscorable_share)} of {totals.episodes:.0f} episodes"


def _held_out(report: TrainReport) -> str:
    """The first and the last evaluation, or why there is none."""
    settings, points = report.config.evaluation, report.summary.evaluations
    if settings.every_steps is None:
        return "not evaluated: evaluation.every_steps is not set"
    last = _last_evaluation(report)
    if last is None:
        return f"no evaluation finished; see {report.directory.log_file('evaluation')}"
    text = f"{headline(last)} {evaluation_text(last)}"
    if len(points) > 1:
        text = f"{headline(points[0])} at step {points[0].step} → {text}"
    if report.outcome.end is RunEnd.FINISHED and last.step < report.summary.steps:
        text += (
            f"; the evaluation of step {report.summary.steps} was skipped: it did not finish within "
            f"evaluation.final_wait_s = {settings.final_wait_s:g} s"
        )
    recorded = recorded_held_out(report.directory)
    if recorded and recorded[-1].trained_ids:
        text += f"; {len(recorded[-1].trained_ids)} of {len(recorded[-1].ids)} held-out tasks were also trained"
    return text


def _last_evaluation(report: TrainReport) -> EvaluationPoint | None:
    return report.summary.evaluations[-1] if report.summary.evaluations else None


def law_text(report: AuditReport) -> str:
    """The conservation law with its numbers, and the share of dropped groups."""
    parts = [f"{count} {state}" for state, count in report.law.items() if count or state in ("durable", "dropped")]
    reasons = ", ".join(f"{count} {kind}" for kind, count in report.dropped.items())
    share = f"{sum(report.dropped.values()) / report.opened:.0%}: " if report.opened else ""
    return f"{report.opened} opened = {' + '.join(parts)}" + (f" ({share}{reasons})" if reasons else "")


def _solved(change: Change) -> str:
    if change.last is None:
        return "solved is not known: set rollout.solved_at or rollout.rewards.solved_by"
    return f"solved  {_arrow(change, as_percent=True)}"


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def _utilisation(ratio: float | None) -> str:
    return "–" if ratio is None else f"{ratio:.0%} of the time; it waited for groups {1 - ratio:.0%}"


def _arrow(change: Change, *, digits: int = 3, as_percent: bool = False) -> str:
    if change.first is None or change.last is None:
        return "–"
    if as_percent:
        return f"{change.first:.0%} → {change.last:.0%}"
    return f"{change.first:.{digits}f} → {change.last:.{digits}f}"
