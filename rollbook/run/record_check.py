"""Compares the ledger with what a run has recorded elsewhere: the trainer's steps, its checkpoints and its metrics.

A database that lost its newest commits is consistent with itself. Only another record shows that it is behind.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from rollbook.contracts.admission import AuditReport, RunId
from rollbook.dashboard.source import StepRow
from rollbook.run.directory import RunDirectory
from rollbook.telemetry.json_tail import JsonTail
from rollbook.trainer.files.step_chain import FILE_NAME, StepChain, read_chain

NEWEST = 20
"""Batches that every audit compares; a full one compares all."""
METRICS_BYTES = 1 << 20
"""The end of the metrics file that is read: the last steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedSteps:
    """Steps of a run by the files of its directory."""

    directory: RunDirectory
    chain: StepChain
    checkpoints: Mapping[int, str]
    """Digest of the weights of each checkpoint, by step."""
    last_metrics: int
    """The last step with metrics of the trainer."""

    @property
    def last(self) -> int:
        return max(self.chain.last_step, self.last_metrics, *self.checkpoints, 0)

    def batches_to_compare(self, *, full: bool) -> list[int]:
        steps = sorted({line.step for line in self.chain.steps})
        return steps if full else steps[-NEWEST:]


def trained_steps(directory: RunDirectory | None) -> TrainedSteps | None:
    """Read them before the ledger: the steps of a live run are in the ledger first. None without a directory."""
    if directory is None or not directory.exists:
        return None
    checkpoints = {}
    for file in directory.checkpoints.glob("step-*/checkpoint.json"):
        with suppress(OSError, ValueError, KeyError):  # an old one may be removed at this moment
            manifest = json.loads(file.read_text(encoding="utf-8"))
            checkpoints[int(manifest["step"])] = str(manifest["weights_digest"])
    last = 0
    for row in JsonTail(directory.metrics_file, last_bytes=METRICS_BYTES).poll():
        if row.get("process") == "trainer" and isinstance(row.get("step"), int):
            last = max(last, row["step"])
    return TrainedSteps(
        directory=directory, chain=read_chain(directory.path), checkpoints=checkpoints, last_metrics=last
    )


def lost_ledger(trained: TrainedSteps | None, run_id: RunId, error: Exception) -> AuditReport | None:
    """The report about a ledger that cannot be read; None if nothing was trained, so that nothing can be lost."""
    if trained is None or trained.last == 0:
        return None
    return AuditReport(
        run_id=run_id,
        opened=0,
        law={},
        dropped={},
        steps=0,
        max_lag=None,
        max_head_offpolicy_versions=0,
        violations=(str(error), _behind(trained, 0)),
    )


def compared(
    report: AuditReport, trained: TrainedSteps, steps: Sequence[StepRow], batches: Mapping[int, str]
) -> AuditReport:
    """The report with what the files contradict. `batches`: digests of the batches to compare, by step."""
    found = list(trained.chain.faults)
    if trained.last > report.steps:
        found.append(_behind(trained, report.steps))
    acknowledged = {(row.step, row.epoch): row.digest for row in steps}
    newest = {row.step: row.digest for row in steps}
    for line in trained.chain.steps:
        weights = acknowledged.get((line.step, line.epoch))
        if weights != line.weights and line.step <= report.steps:
            found.append(
                f"step {line.step} of epoch {line.epoch}: weights {weights} in the ledger, {line.weights} in {FILE_NAME}"
            )
        batch = batches.get(line.step, line.batch)
        if batch != line.batch:
            found.append(f"step {line.step}: batch {batch} in the ledger, {line.batch} in {FILE_NAME}")
    for step, digest in trained.checkpoints.items():
        if 0 < step <= report.steps and newest.get(step) != digest:
            found.append(f"checkpoint {step} has weights {digest}, the ledger {newest.get(step)}")
    last = trained.chain.steps[-1] if trained.chain.steps else None
    groups = report.law.get("trained", 0) + report.law.get("durable", 0)
    if last is not None and last.step == report.steps and last.trained != groups:
        found.append(f"{groups} groups were trained by the ledger, {last.trained} by {FILE_NAME}")
    return replace(report, violations=(*report.violations, *found)) if found else report


def _behind(trained: TrainedSteps, steps: int) -> str:
    sources = {
        FILE_NAME: trained.chain.last_step,
        "checkpoints/": max(trained.checkpoints, default=0),
        trained.directory.metrics_file.name: trained.last_metrics,
    }
    ahead = ", ".join(f"{name} has step {step}" for name, step in sources.items() if step > steps)
    return (
        f"the ledger is behind its run: it ends at step {steps}, {ahead}. It lost commits; rebuild it: "
        f"rollbook ledger rebuild --store {trained.directory.path}"
    )
