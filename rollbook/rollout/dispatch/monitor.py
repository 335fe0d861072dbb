"""Feeds finished groups to the selection-bias audit and to adaptive concurrency, and reports the results."""

from rollbook.concurrency.clock import Clock
from rollbook.contracts.admission import LedgerStatus
from rollbook.contracts.group import DropKind, DropReason, GroupId, GroupOutcome
from rollbook.contracts.ports import GroupSink
from rollbook.rollout.config import RolloutConfig
from rollbook.rollout.dispatch.concurrency import ConcurrencyController, RoundMeter
from rollbook.rollout.dispatch.selection_bias import MEASURES, SelectionAudit
from rollbook.rollout.dispatch.slots import StalenessController
from rollbook.telemetry.events import EventLog
from rollbook.telemetry.metrics import MetricRecorder

PAGE = 1000
"""Past draws in one response."""


class DispatchMonitor:
    def __init__(
        self,
        config: RolloutConfig,
        slots: StalenessController,
        *,
        metrics: MetricRecorder,
        log: EventLog,
        clock: Clock,
    ) -> None:
        self._config = config
        self._slots = slots
        self._metrics = metrics
        self._log = log
        self._clock = clock
        self._audit = SelectionAudit(window=config.fairness_window)
        self._next_audit = clock.now() + config.fairness_every_s
        self._warned: frozenset[str] = frozenset()
        self._meter = RoundMeter(least_s=config.adaptive.interval_s)
        self._concurrency: ConcurrencyController | None = None
        if config.adaptive.enabled:
            most = slots.limit
            self._concurrency = ConcurrencyController(least=min(config.adaptive.least_groups, most), most=most)
            slots.set_limit(self._concurrency.limit)

    def group_settled(self, group: GroupId, outcome: GroupOutcome, drop: DropReason | None, *, seconds: float) -> None:
        """A group was stored, with its last part. Call this before its slot is freed."""
        self._audit.add_settled(
            group,
            tokens=outcome.mean_response_tokens if outcome.num_samples else None,
            seconds=seconds,
            reward=outcome.reward_mean,
            is_filtered=drop is not None and drop.kind is DropKind.FILTERED,
        )
        if self._concurrency is None:
            return
        now, limit = self._clock.now(), self._slots.limit
        tokens = outcome.mean_response_tokens * outcome.num_samples
        self._meter.add_group(tokens=tokens, was_full=self._slots.free == 0, now=now)
        if (done := self._meter.finish_round(limit=limit, now=now)) is None:
            return
        self._slots.set_limit(self._concurrency.next_limit(done))
        if self._slots.limit != limit:
            self._log.info(
                "rollout.concurrency_changed",
                before=limit,
                now=self._slots.limit,
                tokens_per_s=round(done.throughput, 1),
                was_full=done.was_full,
            )

    def group_released(self, group: GroupId, *, seconds: float) -> None:
        self._audit.add_released(group, seconds=seconds)

    async def audit_selection(self, sink: GroupSink, status: LedgerStatus) -> None:
        """Every `fairness_every_s`: request the states of the last groups from the ledger, and report the comparison."""
        if self._clock.now() < self._next_audit:
            return
        self._next_audit = self._clock.now() + self._config.fairness_every_s
        after = max(-1, status.opened - 2 * self._config.fairness_window - 1)
        while past := await sink.outcomes(after=after, limit=PAGE):
            self._audit.update(past)
            after = past[-1].sequence
        self._report_selection()

    def _report_selection(self) -> None:
        report = self._audit.report()
        found = {bias.measure: bias for bias in report.biases}
        for measure in MEASURES:
            self._metrics.add(f"fairness/ks_{measure}", found[measure].distance if measure in found else None)
        self._metrics.add("fairness/left_out_share", report.left_out_share if report.dispatched else None)
        self._metrics.add("fairness/biased_measures", len(report.warnings))
        new = [bias for bias in report.warnings if bias.measure not in self._warned]
        self._warned = frozenset(bias.measure for bias in report.warnings)
        for bias in new:
            self._log.warning(
                "rollout.selection_biased",
                measure=bias.measure,
                distance=round(bias.distance, 3),
                dispatched_mean=round(bias.dispatched_mean, 4),
                trained_mean=round(bias.trained_mean, 4),
                dispatched=report.dispatched,
                trained=report.trained,
                advice="the trained groups differ from the dispatched ones: check which groups are dropped, and why",
            )
