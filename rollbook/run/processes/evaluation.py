"""The evaluation process of a run: measures held-out tasks beside training, with workers and a budget of its own.

It only reads from the ledger: evaluation groups are outside its law. A failure here is told and never stops training.
"""

import asyncio
from pathlib import Path

from rollbook.contracts.admission import LedgerStatus, RunId
from rollbook.contracts.errors import RunError
from rollbook.ledger.client.client import LedgerClient, open_ledger_client
from rollbook.run.commands.measurement import Measurement, Measuring, held_out_tasks, open_measuring
from rollbook.run.directory import write_json
from rollbook.run.model_location import model_location
from rollbook.run.supervision.child_main import RoleContext
from rollbook.telemetry.metrics import Metric, MetricRecorder, Reduction
from rollbook.trainer.checkpoints.checkpoints import Checkpoints

EVALUATION_METRICS = (
    Metric("eval/reward", "", "mean reward over the held-out tasks"),
    Metric("eval/solved", "", "solved part of the held-out tasks"),
    Metric("eval/solved_low", "", "lower end of its 95 % interval"),
    Metric("eval/solved_high", "", "upper end of its 95 % interval"),
    Metric("eval/tasks", "tasks", "held-out tasks that were played", Reduction.SUM),
    Metric(
        "eval/unscorable", "episodes", "episodes without a score: left out, never taken for failures", Reduction.SUM
    ),
    Metric("eval/response_len", "tokens", "sampled tokens an episode, mean"),
    Metric("eval/pinned_ratio", "", "part of the tasks whose every token came from the measured version"),
    Metric("eval/time", "s", "seconds the measurement took", Reduction.SUM),
)
LOOK_S = 0.2
"""Between looks at the ledger: a step takes longer than that, and a look costs about a millisecond."""


async def main(context: RoleContext) -> str:
    config = context.loaded.config
    tasks = await asyncio.to_thread(held_out_tasks, config, context.loaded.source_dir)
    is_shared = config.evaluation.policy == "shared"
    async with (
        open_ledger_client(
            context.addresses["ledger"], RunId(config.run.name), request_s=config.ledger.request_s, log=context.log
        ) as ledger,
        open_measuring(context, tasks, policy_url=context.addresses["policy"] if is_shared else None) as measuring,
    ):
        context.channel.ready(f"{len(tasks)} held-out tasks")
        watch = _Watch(context, ledger, measuring)
        await (watch.live_versions() if is_shared else watch.checkpoints())
    return f"measured {watch.count} times"


class _Watch:
    """Looks at where the run stands, and measures when it is time."""

    def __init__(self, context: RoleContext, ledger: LedgerClient, measuring: Measuring) -> None:
        every = context.loaded.config.evaluation.every_steps
        assert every is not None
        self._every = every
        self._context = context
        self._ledger = ledger
        self._measuring = measuring
        self._metrics = MetricRecorder("evaluation", EVALUATION_METRICS, context.directory.metrics_file)
        self._due = 0
        self._last = -1
        self.count = 0

    async def live_versions(self) -> None:
        """Measure what the run's own server has.

        Takes:  the version that the ledger says is confirmed.
        Waits:  between looks.
        Ends:   when the run is over, after a last measurement; on a drain at once.
        """
        while not self._context.draining.is_set():
            status = await self._ledger.status()
            version, publication = status.version, status.publication
            if version is not None and publication is not None and self._is_due(version, status):
                self._tell(await self._measuring.measure(publication=publication, step=version))
            elif status.ended:
                return
            await self._pause()

    async def checkpoints(self) -> None:
        """Measure checkpoints on the evaluation's own server: the version is pinned, whatever training does meanwhile."""
        config, directory = self._context.loaded.config, self._context.directory
        kept = Checkpoints(directory.checkpoints, model_dir=model_location(directory), config=config.trainer)
        while not self._context.draining.is_set():
            status = await self._ledger.status()
            # The initial weights first, unless an earlier process of this run has measured them.
            step = max(kept.steps(), default=0) if self._file(0).exists() else 0
            if self._is_due(step, status):
                await self._measure_checkpoint(step)
            elif status.ended:
                return
            await self._pause()

    async def _measure_checkpoint(self, step: int) -> None:
        directory = self._context.directory
        model_dir: Path = directory.checkpoints / f"step-{step:06d}" / "model" if step else model_location(directory)
        try:
            publication = await self._measuring.publish(model_dir, step=step)
        except (RunError, OSError) as error:
            # It was removed while it was read: there is a newer one by now.
            if model_dir.exists():
                raise
            self._context.log.info("evaluation.checkpoint_gone", step=step, cause=str(error))
            return
        self._tell(await self._measuring.measure(publication=publication, step=step))

    def _is_due(self, step: int, status: LedgerStatus) -> bool:
        return step > self._last and (step >= self._due or status.ended)

    def _tell(self, measured: Measurement) -> None:
        self._last = measured.step
        self._due = (measured.step // self._every + 1) * self._every
        self.count += 1
        whole = measured.whole
        values: dict[str, float | None] = {
            "eval/reward": None if whole.reward is None else whole.reward.mean,
            "eval/solved": None if whole.solved is None else whole.solved.mean,
            "eval/solved_low": None if whole.solved is None else whole.solved.low,
            "eval/solved_high": None if whole.solved is None else whole.solved.high,
            "eval/tasks": whole.tasks,
            "eval/unscorable": whole.unscorable,
            "eval/response_len": whole.response_tokens,
            "eval/pinned_ratio": measured.pinned_ratio,
            "eval/time": measured.seconds,
        }
        for name, value in values.items():
            self._metrics.add(name, value)
        self._metrics.tick(step=measured.step)
        path = self._file(measured.step)
        path.parent.mkdir(exist_ok=True)
        write_json(path, measured.row())
        self._context.log.info("evaluation.measured", **values, step=measured.step)
        self._context.channel.doing(f"step {measured.step} measured")

    def _file(self, step: int) -> Path:
        return self._context.directory.path / "evaluations" / f"step-{step:06d}.json"

    async def _pause(self) -> None:
        try:
            async with asyncio.timeout(LOOK_S):
                await self._context.draining.wait()
        except TimeoutError:
            pass
