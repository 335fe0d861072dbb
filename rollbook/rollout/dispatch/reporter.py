"""Reports finished groups: metrics, spans, failures as events, and an alert when nearly all groups are filtered."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from rollbook.contracts.group import DropKind, GroupId
from rollbook.rollout.dispatch.attempts import Attempt
from rollbook.rollout.dispatch.failure_breaker import FailureBreaker, GroupEnd
from rollbook.rollout.groups.results import PlayedPart
from rollbook.rollout.metrics import record_group, record_rewards, record_samples
from rollbook.telemetry.events import EventLog
from rollbook.telemetry.metrics import MetricRecorder
from rollbook.telemetry.spans import SpanRecorder

MAX_WARNED_CAUSES = 100
"""Distinct causes of failure logged as warnings, each once; later ones are logged as info."""
FILTER_WINDOW = 200
FILTER_ALERT_SHARE, FILTER_CLEAR_SHARE = 0.9, 0.5
"""Share of filtered groups in the window that raises the alert, and below which it is cleared."""


@dataclass(frozen=True, slots=True)
class FilterAlert:
    """Nearly all groups of the window were filtered: they cost compute and train nothing."""

    filtered: int
    of: int
    reward: float | None
    """Mean reward of the groups in the window."""

    @property
    def advice(self) -> str:
        if self.reward is None:
            return "find out why groups are filtered: rollbook explain GROUP_ID"
        return (
            f"their mean reward is {self.reward:.2f}. Near the maximum, the tasks are mastered: add harder tasks or end the run. "
            "Near the minimum, they are too hard: add easier tasks (tasks.order = 'curriculum'), more samples per prompt, or "
            "partial rewards"
        )


class FilterMonitor:
    """Counts filtered groups in a window. Alerts once until the share has fallen below the clear share."""

    def __init__(self, window: int = FILTER_WINDOW) -> None:
        self._groups: deque[tuple[bool, float | None]] = deque(maxlen=window)
        self._filtered = 0
        self._is_alerted = False

    def record(self, *, is_filtered: bool, reward: float | None) -> FilterAlert | None:
        if len(self._groups) == self._groups.maxlen:
            self._filtered -= self._groups[0][0]
        self._groups.append((is_filtered, reward))
        self._filtered += is_filtered
        if len(self._groups) < (self._groups.maxlen or 0):
            return None
        share = self._filtered / len(self._groups)
        if self._is_alerted:
            self._is_alerted = share >= FILTER_CLEAR_SHARE
            return None
        if share < FILTER_ALERT_SHARE:
            return None
        self._is_alerted = True
        rewards = [reward for _, reward in self._groups if reward is not None]
        return FilterAlert(self._filtered, len(self._groups), sum(rewards) / len(rewards) if rewards else None)


class GroupReporter:
    def __init__(
        self,
        *,
        metrics: MetricRecorder,
        spans: SpanRecorder,
        log: EventLog,
        breaker: FailureBreaker,
        rewards: Sequence[str] = (),
    ) -> None:
        self._rewards = tuple(rewards)
        self._metrics = metrics
        self._spans = spans
        self._log = log
        self._breaker = breaker
        self._warned_causes: set[str] = set()
        self._filters = FilterMonitor()

    def report_released(self) -> None:
        self._metrics.add("rollout/groups_released", 1)

    def report(self, attempt: Attempt, result: PlayedPart, *, seconds: float, is_over: bool) -> None:
        """Report a result, and the whole group if it `is_over`. Raises `RolloutsFailingError` when too many groups fail."""
        grant, outcome, drop = attempt.grant, result.outcome, result.drop
        record_samples(self._metrics, outcome, drop)
        if result.scores:
            record_rewards(self._metrics, result.scores, self._rewards)
        if is_over and attempt.outcome is not None:
            record_group(self._metrics, attempt.outcome)
            self._metrics.add("rollout/parts_per_group", attempt.num_parts)
            self._spans.record(
                "rollout.group",
                attempt.started_wall,
                attempt.started_wall + seconds,
                group_id=attempt.draw_id,
                attempt=grant.attempt,
                samples=attempt.outcome.num_samples,
                reward=attempt.outcome.reward_mean,
                drop=None if drop is None else str(drop.kind),
            )
        for number, episode in enumerate(result.episodes):
            self._spans.record(
                "rollout.episode",
                episode.start,
                episode.end,
                group_id=attempt.draw_id,
                attempt=grant.attempt,
                episode=number,
                reward=episode.reward,
                cause=episode.cause,
                turns=[(round(start, 5), round(end, 5)) for start, end in episode.turns],
            )
        if outcome.invalid_causes or outcome.declined_samples:
            self._log_failures(attempt.draw_id, result)
        is_filtered = drop is not None and drop.kind is DropKind.FILTERED
        if alert := self._filters.record(is_filtered=is_filtered, reward=outcome.reward_mean):
            self._log.warning("rollout.mostly_filtered", filtered=alert.filtered, of_last=alert.of, advice=alert.advice)
        self._breaker.record(_end_of(result), outcome.invalid_causes)

    def _log_failures(self, group: GroupId, result: PlayedPart) -> None:
        """A cause seen for the first time is a warning."""
        outcome = result.outcome
        new = [cause for cause in outcome.invalid_causes if cause not in self._warned_causes]
        is_warning = bool(new) and len(self._warned_causes) < MAX_WARNED_CAUSES
        if is_warning:
            self._warned_causes.update(new)
        (self._log.warning if is_warning else self._log.info)(
            "rollout.samples_failed" if result.drop is None else "rollout.group_failed",
            group_id=group,
            causes=dict(outcome.invalid_causes),
            retried=outcome.retried_samples,
            declined=outcome.declined_samples,
            drop=None if result.drop is None else str(result.drop),
        )


def _end_of(result: PlayedPart) -> GroupEnd:
    if result.drop is not None and result.drop.kind is DropKind.INVALID:
        return GroupEnd.FAILED
    return GroupEnd.USEFUL if result.outcome.num_scorable else GroupEnd.DECLINED
