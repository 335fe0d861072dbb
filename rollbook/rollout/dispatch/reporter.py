"""What is told about a finished group: metrics, its span on the timeline, the causes of its failures; and the breaker's verdict."""

from collections.abc import Sequence

from rollbook.contracts.admission import Grant
from rollbook.contracts.group import DropKind, GroupId
from rollbook.rollout.dispatch.failure_breaker import CircuitBreaker, GroupEnd
from rollbook.rollout.dispatch.filter_alert import FilterWatch
from rollbook.rollout.metrics import record_group, record_rewards
from rollbook.rollout.workers.messages import Finished
from rollbook.telemetry.events import EventLog
from rollbook.telemetry.metrics import MetricRecorder
from rollbook.telemetry.spans import SpanRecorder

TOLD_CAUSES = 100
"""Distinct causes of failure that are told as warnings, each once; a person has seen enough by then."""


class GroupTeller:
    def __init__(
        self,
        *,
        metrics: MetricRecorder,
        spans: SpanRecorder,
        log: EventLog,
        breaker: CircuitBreaker,
        rewards: Sequence[str] = (),
    ) -> None:
        self._rewards = tuple(rewards)
        self._metrics = metrics
        self._spans = spans
        self._log = log
        self._breaker = breaker
        self._told_causes: set[str] = set()
        self._filters = FilterWatch()

    def tell(self, grant: Grant, result: Finished, *, started_wall: float, seconds: float) -> None:
        """Raises `RolloutsFailingError` when this was one failure too many."""
        outcome, drop = result.outcome, result.drop
        record_group(self._metrics, outcome, drop)
        if self._rewards:
            record_rewards(self._metrics, result.scores, self._rewards)
        self._spans.record(
            "rollout.group",
            started_wall,
            started_wall + seconds,
            group_id=grant.group_id,
            attempt=grant.attempt,
            samples=outcome.num_samples,
            reward=outcome.reward_mean,
            drop=None if drop is None else str(drop.kind),
        )
        if outcome.invalid_causes or outcome.declined_samples:
            self._explain(grant.group_id, result)
        is_filtered = drop is not None and drop.kind is DropKind.FILTERED
        if drought := self._filters.record(is_filtered=is_filtered, reward=outcome.reward_mean):
            self._log.warning(
                "rollout.mostly_filtered", filtered=drought.filtered, of_last=drought.of, advice=drought.advice
            )
        self._breaker.record(end_of(result), outcome.invalid_causes)

    def _explain(self, group: GroupId, result: Finished) -> None:
        """Every failure is an event; the first of its kind is also a warning on the terminal."""
        fields = {
            "group_id": group,
            "causes": dict(result.outcome.invalid_causes),
            "retried": result.outcome.retried_samples,
            "declined": result.outcome.declined_samples,
            "drop": None if result.drop is None else str(result.drop),
        }
        event = "rollout.samples_failed" if result.drop is None else "rollout.group_failed"
        fresh = [cause for cause in result.outcome.invalid_causes if cause not in self._told_causes]
        if fresh and len(self._told_causes) < TOLD_CAUSES:
            self._told_causes.update(fresh)
            self._log.warning(event, **fields)
        else:
            self._log.info(event, **fields)


def end_of(result: Finished) -> GroupEnd:
    """How the breaker sees a group."""
    if result.drop is not None and result.drop.kind is DropKind.INVALID:
        return GroupEnd.FAILED
    return GroupEnd.USEFUL if result.outcome.num_scorable else GroupEnd.DECLINED
