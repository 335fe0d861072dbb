"""The summary of a finished run: text for the terminal, and one JSON row."""

from typing import Any

from rich.console import Console
from rich.markup import escape

from rollbook.dashboard.run_metrics import Change, EvaluationPoint
from rollbook.dashboard.terminal import duration, evaluation_text, percent, small_number
from rollbook.ledger.tools.audit import AuditReport
from rollbook.run.commands.train import TrainReport
from rollbook.run.supervision.supervisor import RunEnd


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
        divergence = "the initial policy" if figures.has_reference_kl else "the start of each step"
        bound = report.config.gate.max_head_offpolicy_versions
        lines += [
            ("reward", f"{_arrow(figures.reward)}    solved  {_arrow(figures.solved, as_percent=True)}"),
            ("held out", escape(_held_out(report))),
            (
                "response",
                f"{_arrow(figures.response_tokens, digits=0)} tokens; truncated {percent(figures.truncated.last)} at the end; "
                f"unscorable {percent(totals.unscorable_share)} of {totals.episodes:.0f} episodes",
            ),
            ("entropy", f"{_arrow(figures.entropy, digits=2)}    KL to {divergence} {small_number(figures.kl.last)}"),
            (
                "lag",
                f"at most {figures.max_lag} of {bound} allowed    trainer busy  {_utilisation(figures.trainer_utilisation)}",
            ),
        ]
    if report.outcome.restarts or totals.worker_deaths:
        lines.append(
            ("deaths", f"{totals.worker_deaths:.0f} of workers; {report.outcome.restarts} restarts of other processes")
        )
    if law is None:
        lines.append(("audit", "none: the run failed before its ledger was created"))
    else:
        verdict = f"[green]ok[/]: {escape(law_text(law))}" if law.ok else "[red]violated[/]:"
        lines.append(("audit", verdict))
    return lines


def _held_out(report: TrainReport) -> str:
    """The first and the last evaluation, or why there is none."""
    settings, points = report.config.evaluation, report.summary.evaluations
    if settings.every_steps is None:
        return "not evaluated: evaluation.every_steps is not set"
    last = _last_evaluation(report)
    if last is None:
        return f"no evaluation finished; see {report.directory.log_file('evaluation')}"
    text = f"{percent(last.solved)} {evaluation_text(last)}"
    if len(points) > 1:
        text = f"{percent(points[0].solved)} at step {points[0].step} → {text}"
    if report.outcome.end is RunEnd.FINISHED and last.step < report.summary.steps:
        text += (
            f"; the evaluation of step {report.summary.steps} was skipped: it did not finish within "
            f"evaluation.final_wait_s = {settings.final_wait_s:g} s"
        )
    return text


def _last_evaluation(report: TrainReport) -> EvaluationPoint | None:
    return report.summary.evaluations[-1] if report.summary.evaluations else None


def law_text(report: AuditReport) -> str:
    """The conservation law with its numbers, and the share of dropped groups."""
    parts = [f"{count} {state}" for state, count in report.law.items() if count or state in ("durable", "dropped")]
    reasons = ", ".join(f"{count} {kind}" for kind, count in report.dropped.items())
    share = f"{sum(report.dropped.values()) / report.opened:.0%}: " if report.opened else ""
    return f"{report.opened} opened = {' + '.join(parts)}" + (f" ({share}{reasons})" if reasons else "")


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
