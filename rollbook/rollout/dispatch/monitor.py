"""What a dispatcher learns from the groups it played: whether the trained ones are like the rest, and how many to play at once.

The decisions are pure (`fairness.py`, `adaptive.py`); here they are fed, and told as metrics and warnings.
"""

from rollbook.concurrency.clock import Clock
from rollbook.contracts.admission import Grant, LedgerStatus
from rollbook.contracts.group import DropKind
from rollbook.contracts.ports import GroupSink
from rollbook.rollout.config import RolloutConfig
from rollbook.rollout.dispatch.concurrency import ConcurrencyController, RoundMeter
from rollbook.rollout.dispatch.selection_bias import MEASURES, SelectionAudit
from rollbook.rollout.dispatch.slots import StalenessController
from rollbook.rollout.workers.messages import Finished
from rollbook.telemetry.events import EventLog
from rollbook.telemetry.metrics import MetricRecorder

PAGE = 1000
"""Past draws in one answer."""


class Steering:
    def __init__(
        self,
        config: RolloutConfig,
        controller: StalenessController,
        *,
        metrics: MetricRecorder,
        log: EventLog,
        clock: Clock,
    ) -> None:
        self._config = config
        self._controller = controller
        self._metrics = metrics
        self._log = log
        self._clock = clock
        self._audit = SelectionAudit(window=config.fairness_window)
        self._next_audit = clock.now() + config.fairness_every_s
        self._warned: frozenset[str] = frozenset()
        self._rounds = RoundMeter(least_s=config.adaptive.interval_s)
        self._seeker: ConcurrencyController | None = None
        if config.adaptive.enabled:
            self._seeker = ConcurrencyController(config.adaptive.rules(most=controller.limit))
            controller.set_limit(self._seeker.limit)

    def finished(self, grant: Grant, result: Finished, *, seconds: float) -> None:
        """A group was stored. Call it before its place is free."""
        outcome = result.outcome
        self._audit.landed(
            grant.group_id,
            tokens=outcome.mean_response_tokens if outcome.num_samples else None,
            seconds=seconds,
            reward=outcome.reward_mean,
            is_filtered=result.drop is not None and result.drop.kind is DropKind.FILTERED,
        )
        if self._seeker is None:
            return
        now, limit = self._clock.now(), self._controller.limit
        tokens = outcome.mean_response_tokens * outcome.num_samples
        self._rounds.finished(tokens=tokens, was_full=self._controller.free == 0, now=now)
        if (done := self._rounds.take(limit=limit, now=now)) is None:
            return
        self._controller.set_limit(self._seeker.after(done))
        if self._controller.limit != limit:
            self._log.info(
                "rollout.concurrency_moved",
                before=limit,
                now=self._controller.limit,
                tokens_per_s=round(done.throughput, 1),
                was_full=done.was_full,
            )

    def given_up(self, grant: Grant, *, seconds: float) -> None:
        self._audit.given_up(grant.group_id, seconds=seconds)

    def measure(self) -> None:
        self._metrics.add("rollout/concurrency_limit", self._controller.limit)

    async def look(self, sink: GroupSink, status: LedgerStatus) -> None:
        """Now and then: ask the ledger what became of the last groups, and compare."""
        if self._clock.now() < self._next_audit:
            return
        self._next_audit = self._clock.now() + self._config.fairness_every_s
        after = max(-1, status.opened - 2 * self._config.fairness_window - 1)
        while past := await sink.outcomes(after=after, limit=PAGE):
            self._audit.heard(past)
            after = past[-1].sequence
        self.tell()

    def tell(self) -> None:
        report = self._audit.report()
        found = {bias.measure: bias for bias in report.biases}
        for measure in MEASURES:
            self._metrics.add(f"fairness/ks_{measure}", found[measure].distance if measure in found else None)
        self._metrics.add("fairness/left_out_share", report.left_out_share if report.dispatched else None)
        self._metrics.add("fairness/biased_measures", len(report.warnings))
        fresh = [bias for bias in report.warnings if bias.measure not in self._warned]
        self._warned = frozenset(bias.measure for bias in report.warnings)
        for bias in fresh:
            self._log.warning(
                "rollout.selection_biased",
                measure=bias.measure,
                distance=round(bias.distance, 3),
                dispatched_mean=round(bias.dispatched_mean, 4),
                trained_mean=round(bias.trained_mean, 4),
                dispatched=report.dispatched,
                trained=report.trained,
                advice="what is trained is not like what was dispatched: see which groups are dropped, and why",
            )
