"""The dispatcher's monitor: selection bias is reported, and the number of groups in flight adapts."""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rollbook.concurrency.clock import ManualClock
from rollbook.contracts.admission import GateState, LedgerStatus, PastDraw, RunId
from rollbook.contracts.freshness import FreshnessRule, GateCounts
from rollbook.contracts.group import DropKind, DropReason, GroupId, GroupOutcome, GroupState
from rollbook.contracts.task import TaskId
from rollbook.rollout.config import RolloutConfig
from rollbook.rollout.dispatch.monitor import DispatchMonitor
from rollbook.rollout.dispatch.slots import StalenessController
from rollbook.rollout.metrics import rollout_metrics
from rollbook.telemetry.events import EventLog, read_json_lines
from rollbook.telemetry.metrics import MetricRecorder, read_metrics


class FastGroups:
    """The outcomes of a ledger that trained the fast groups and dropped the slow ones."""

    async def outcomes(self, *, after: int, limit: int) -> list[PastDraw]:
        return [
            PastDraw(
                group_id=GroupId(f"t{number}@0"),
                task_id=TaskId(f"t{number}"),
                number=0,
                position=number,
                sequence=number,
                state=GroupState.DURABLE if number % 2 else GroupState.DROPPED,
                outcome=None,
            )
            for number in range(after + 1, 100)
        ][:limit]


OUTCOME = GroupOutcome(
    num_samples=4,
    num_scorable=4,
    reward_mean=0.5,
    reward_std=0.1,
    solved_rate=None,
    truncated_rate=0.0,
    mean_turns=1.0,
    mean_response_tokens=10.0,
    seconds=1.0,
)
DROP = DropReason(DropKind.INVALID, "no samples")


@contextmanager
def open_monitor(
    directory: Path, clock: ManualClock, *, slots: int = 64, adaptive: bool = False
) -> Iterator[tuple[DispatchMonitor, StalenessController, MetricRecorder]]:
    config = RolloutConfig.model_validate({"adaptive": {"enabled": adaptive, "interval_s": 1.0}})
    controller = StalenessController(
        FreshnessRule(groups_per_step=8, max_in_flight=slots, max_head_offpolicy_versions=1), slots=slots
    )
    metrics = MetricRecorder("rollout", rollout_metrics(config), directory / "metrics.jsonl")
    log = EventLog("rollout", directory / "events.jsonl", echo=io.StringIO())
    yield DispatchMonitor(config, controller, metrics=metrics, log=log, clock=clock), controller, metrics
    log.close()


async def test_selection_bias_is_a_metric_and_one_warning(tmp_path: Path) -> None:
    clock = ManualClock()
    sink: Any = FastGroups()
    status = LedgerStatus(
        run_id=RunId("run"), gate=GateState.OPEN, capacity=8, counts=GateCounts(), opened=100, version=0
    )
    with open_monitor(tmp_path, clock) as (monitor, _, metrics):
        for number in range(100):
            monitor.group_settled(GroupId(f"t{number}@0"), OUTCOME, DROP, seconds=1.0 if number % 2 else 9.0)
        await monitor.audit_selection(sink, status)
        assert read_json_lines(tmp_path / "events.jsonl") == [], "too early"
        for _ in range(3):
            clock.jump(31)
            await monitor.audit_selection(sink, status)
        metrics.tick()
    (warning,) = read_json_lines(tmp_path / "events.jsonl")
    assert (warning["event"], warning["measure"], warning["level"]) == (
        "rollout.selection_biased",
        "seconds",
        "warning",
    )
    assert (warning["dispatched_mean"], warning["trained_mean"]) == (5.0, 1.0)
    (row,) = read_metrics(tmp_path / "metrics.jsonl")
    assert row["fairness/ks_seconds"] == 0.5
    assert row["fairness/ks_tokens"] == 0.0
    assert row["fairness/left_out_share"] == 0.5
    assert row["fairness/biased_measures"] == 1


def play_rounds(
    clock: ManualClock, monitor: DispatchMonitor, controller: StalenessController, *, knee: int, groups: int
) -> None:
    """An engine that serves `knee` groups at a time, each in one second; the others wait."""
    for number in range(groups):
        controller.running = controller.limit
        clock.jump(1.0 / min(knee, controller.limit))
        monitor.group_settled(GroupId(f"t{number}@0"), OUTCOME, DROP, seconds=1.0)


def test_the_number_of_groups_in_flight_adapts_only_when_enabled(tmp_path: Path) -> None:
    clock = ManualClock()
    with open_monitor(tmp_path / "fixed", clock) as (monitor, controller, _):
        play_rounds(clock, monitor, controller, knee=12, groups=500)
        assert controller.limit == 64
    with open_monitor(tmp_path / "adaptive", clock, adaptive=True) as (monitor, controller, _):
        play_rounds(clock, monitor, controller, knee=12, groups=3000)
        assert 8 <= controller.limit <= 20
    changes = [
        e
        for e in read_json_lines(tmp_path / "adaptive" / "events.jsonl")
        if e["event"] == "rollout.concurrency_changed"
    ]
    assert len(changes) > 5
    assert controller.to_propose == 0, "running groups count"
