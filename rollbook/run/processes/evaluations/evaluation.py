"""The evaluation process of a run: evaluates held-out tasks during training, with separate workers.

It only reads from the ledger; evaluation groups are not stored there. A failure is reported and does not stop training.
"""

import asyncio
from pathlib import Path

from rollbook.contracts.admission import LedgerStatus
from rollbook.contracts.errors import RunError
from rollbook.ledger.client.client import LedgerClient
from rollbook.run.directory import write_json
from rollbook.run.ledger_clients import open_run_ledger
from rollbook.run.processes.evaluations.measurement import (
    EvaluationSession,
    Measurement,
    held_out_tasks,
    open_evaluation,
)
from rollbook.run.supervision.child_main import RoleContext
from rollbook.telemetry.metrics import Metric, MetricRecorder, Reduction
from rollbook.trainer.checkpoints.checkpoints import Checkpoints

EVALUATION_METRICS = (
    Metric("eval/reward", "", "mean reward over the held-out tasks"),
    Metric("eval/reward_low", "", "lower end of its 95 % interval"),
    Metric("eval/reward_high", "", "upper end of its 95 % interval"),
    Metric("eval/solved", "", "solved fraction of the held-out tasks"),
    Metric("eval/solved_low", "", "lower end of its 95 % interval"),
    Metric("eval/solved_high", "", "upper end of its 95 % interval"),
    Metric("eval/tasks", "tasks", "held-out tasks that were played", Reduction.SUM),
    Metric("eval/unscorable", "episodes", "episodes without a score; not counted as failures", Reduction.SUM),
    Metric("eval/response_len", "tokens", "sampled tokens per episode, mean"),
    Metric("eval/pinned_ratio", "", "fraction of the tasks whose tokens all came from the evaluated version"),
    Metric("eval/time", "s", "duration of the evaluation", Reduction.SUM),
)
POLL_S = 0.2
"""Interval between requests to the ledger: shorter than a step, and a request costs about a millisecond."""


async def main(context: RoleContext) -> str:
    config = context.loaded.config
    tasks = await asyncio.to_thread(held_out_tasks, config, context.loaded.source_dir)
    is_shared = config.evaluation.policy == "shared"
    async with (
        open_run_ledger(context.loaded, context.directory, context.addresses["ledger"], log=context.log) as ledger,
        open_evaluation(context, tasks, policy_url=context.addresses["policy"] if is_shared else None) as session,
    ):
        context.channel.ready(f"{len(tasks)} held-out tasks")
        schedule = _EvaluationSchedule(context, ledger, session)
        await (schedule.follow_versions() if is_shared else schedule.follow_checkpoints())
    return f"evaluated {schedule.count} times"


class _EvaluationSchedule:
    """Follows the run's progress in the ledger and evaluates every `every_steps` steps."""

    def __init__(self, context: RoleContext, ledger: LedgerClient, session: EvaluationSession) -> None:
        every = context.loaded.config.evaluation.every_steps
        assert every is not None
        self._every = every
        self._context = context
        self._ledger = ledger
        self._session = session
        self._metrics = MetricRecorder("evaluation", EVALUATION_METRICS, context.directory.metrics_file)
        self._due = 0
        self._last = -1
        self.count = 0

    async def follow_versions(self) -> None:
        """Evaluate the run's own policy server.

        Takes:  the confirmed version, from the ledger.
        Waits:  `POLL_S` between requests.
        Ends:   when the run is over, after a last evaluation; on a drain at once.
        """
        while not self._context.draining.is_set():
            status = await self._ledger.status()
            version, publication = status.version, status.publication
            if version is not None and publication is not None and self._is_due(version, status):
                self._report(await self._session.measure(publication=publication, step=version))
            elif status.ended:
                return
            await self._pause()

    async def follow_checkpoints(self) -> None:
        """Evaluate checkpoints on the evaluation's own server, where the version is pinned."""
        config, directory = self._context.loaded.config, self._context.directory
        kept = Checkpoints(directory.checkpoints, model_dir=directory.initial_model, config=config.trainer)
        while not self._context.draining.is_set():
            status = await self._ledger.status()
            # The initial weights first, unless an earlier process of this run has evaluated them.
            step = max(kept.steps(), default=0) if self._file(0).exists() else 0
            if self._is_due(step, status):
                await self._evaluate_checkpoint(step)
            elif status.ended:
                return
            await self._pause()

    async def _evaluate_checkpoint(self, step: int) -> None:
        directory = self._context.directory
        model_dir: Path = directory.checkpoints / f"step-{step:06d}" / "model" if step else directory.initial_model
        try:
            publication = await self._session.publish(model_dir, step=step)
        except (RunError, OSError) as error:
            # The trainer removed it during the read because there is a newer one.
            if model_dir.exists():
                raise
            self._context.log.info("evaluation.checkpoint_removed", step=step, cause=str(error))
            return
        self._report(await self._session.measure(publication=publication, step=step))

    def _is_due(self, step: int, status: LedgerStatus) -> bool:
        return step > self._last and (step >= self._due or status.ended)

    def _report(self, measured: Measurement) -> None:
        self._last = measured.step
        self._due = (measured.step // self._every + 1) * self._every
        self.count += 1
        overall = measured.overall
        values: dict[str, float | None] = {
            "eval/reward": None if overall.reward is None else overall.reward.mean,
            "eval/reward_low": None if overall.reward is None else overall.reward.low,
            "eval/reward_high": None if overall.reward is None else overall.reward.high,
            "eval/solved": None if overall.solved is None else overall.solved.mean,
            "eval/solved_low": None if overall.solved is None else overall.solved.low,
            "eval/solved_high": None if overall.solved is None else overall.solved.high,
            "eval/tasks": overall.tasks,
            "eval/unscorable": overall.unscorable,
            "eval/response_len": overall.response_tokens,
            "eval/pinned_ratio": measured.pinned_ratio,
            "eval/time": measured.seconds,
        }
        for name, value in values.items():
            self._metrics.add(name, value)
        self._metrics.tick(step=measured.step)
        path = self._file(measured.step)
        path.parent.mkdir(exist_ok=True)
        write_json(path, measured.row())
        self._context.log.info("evaluation.finished", **values, step=measured.step)
        self._context.channel.doing(f"step {measured.step} evaluated")

    def _file(self, step: int) -> Path:
        return self._context.directory.path / "evaluations" / f"step-{step:06d}.json"

    async def _pause(self) -> None:
        try:
            async with asyncio.timeout(POLL_S):
                await self._context.draining.wait()
        except TimeoutError:
            pass
