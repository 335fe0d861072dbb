"""`run_async_rl_loop`: the asynchronous recipe as one function, in one process, with the training step of the caller.

It has the names and parameters of the recipe that users know from other projects. Admission and the staleness bound are those of
`contracts/freshness.py`. Nothing is stored: a run that must survive a crash is started with `rollbook.train`.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from rollbook.concurrency.tasks import first_error
from rollbook.contracts.freshness import BatchPolicy, FreshnessRule
from rollbook.contracts.group import PromptGroup
from rollbook.contracts.trajectory import RolloutSample
from rollbook.integrations.recipe_groups import (
    AdvantageFn,
    Rollout,
    compute_advantages,
    refuse_unsupported,
    rollout_to_prompt_group,
)
from rollbook.rollout.dispatch.slots import StalenessController

SampleFactory: TypeAlias = Callable[[int], Awaitable[RolloutSample | None]]
UNBOUNDED = 1 << 30


class TrainStepFns(Protocol):
    def train_step(
        self, global_step: int, groups: list[PromptGroup], stats: dict[str, Any], /
    ) -> tuple[int, dict[str, Any]]:
        """Train on the groups; returns the new number of steps, and metrics."""


@dataclass(slots=True)
class RowRequest:
    """One row of the data. `sample_factory(i)` plays episode i and returns its sample, or None if there is none.

    `on_resolved` is called once: "accepted" (the group is about to be trained), "filter" (the filter refused it), "none" (too few
    samples, or advantages that are not finite), or "stale" (it is older than the staleness bound).
    """

    row_id: Hashable
    sample_factory: SampleFactory
    row_meta: dict[str, Any] | None = None
    on_resolved: Callable[[str], None] | None = None


async def run_async_rl_loop(
    rows: Iterable[RowRequest],
    *,
    train_fns: TrainStepFns,
    completions_per_prompt: int,
    prompt_groups_per_step: int,
    max_head_offpolicy_versions: int,
    advantage_fn: AdvantageFn = compute_advantages,
    with_reference: bool = False,
    router_replay_completion_only: bool = False,
    min_group_size: int = 1,
    weight_sync_fn: Callable[[int], object] | None = None,
    weight_sync_interval: int = 1,
    max_concurrent: int | None = None,
    dynamic_filter_fn: Callable[[PromptGroup], bool] | None = None,
    global_step: int = 0,
    resolved_rows_offset: int = 0,
    resolved_rows_fn: Callable[[], int] | None = None,
    return_final_stats: bool = False,
    synchronous_training: bool = False,
) -> int | tuple[int, dict[str, Any]]:
    """Play rows and train on them at the same time, until the rows are exhausted. Returns the number of steps.

    A row is played `completions_per_prompt` times and makes one group; `prompt_groups_per_step` groups make a batch, the last one
    may be smaller. `max_concurrent` limits the running episodes. `weight_sync_fn(step)` publishes the weights after every
    `weight_sync_interval` steps; without it, the weights of a step are used at once. `dynamic_filter_fn` returns True for groups to
    keep. Training and publishing run in a thread. An exception in an episode ends the loop.

    The lag of a group counts steps: a group that started with the weights of step v is in batch v + 1 + lag. No group with a lag
    above `max_head_offpolicy_versions` is trained; it is resolved as "stale".
    """
    if completions_per_prompt < 1 or min_group_size < 1 or weight_sync_interval < 1:
        raise ValueError("completions_per_prompt, min_group_size and weight_sync_interval must be at least 1")
    if min_group_size > completions_per_prompt:
        raise ValueError(
            f"min_group_size {min_group_size} is above completions_per_prompt {completions_per_prompt}: no row would be trained"
        )
    if max_concurrent is not None and max_concurrent < completions_per_prompt:
        raise ValueError(
            f"max_concurrent {max_concurrent} is below completions_per_prompt {completions_per_prompt}: no row could start"
        )
    if weight_sync_interval > max_head_offpolicy_versions + 1:
        raise ValueError(
            f"weight_sync_interval {weight_sync_interval} is above max_head_offpolicy_versions + 1 = "
            f"{max_head_offpolicy_versions + 1}: all groups would be too old before the weights are published"
        )
    refuse_unsupported(with_reference=with_reference, router_replay_completion_only=router_replay_completion_only)
    rule = FreshnessRule(
        groups_per_step=prompt_groups_per_step,
        max_in_flight=UNBOUNDED if max_concurrent is None else max_concurrent // completions_per_prompt,
        max_head_offpolicy_versions=max_head_offpolicy_versions,
        policy=BatchPolicy.DROP,
    )
    loop = _Loop(
        rows=iter(rows),
        rule=rule,
        train_fns=train_fns,
        completions_per_prompt=completions_per_prompt,
        min_group_size=min_group_size,
        advantage_fn=advantage_fn,
        keep=dynamic_filter_fn or (lambda _: True),
        publish=weight_sync_fn,
        publish_every=weight_sync_interval,
        is_synchronous=synchronous_training,
        first_row=resolved_rows_offset,
        count_resolved=resolved_rows_fn,
        global_step=global_step,
    )
    try:
        await loop.run()
    except BaseExceptionGroup as errors:
        raise first_error(errors) from errors
    return (loop.global_step, loop.totals()) if return_final_stats else loop.global_step


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ready:
    request: RowRequest
    group: PromptGroup
    version: int
    """Steps that were trained when the row started."""


@dataclass(slots=True, kw_only=True)
class _Loop:
    rows: Iterator[RowRequest]
    rule: FreshnessRule
    train_fns: TrainStepFns
    completions_per_prompt: int
    min_group_size: int
    advantage_fn: AdvantageFn
    keep: Callable[[PromptGroup], bool]
    publish: Callable[[int], object] | None
    publish_every: int
    is_synchronous: bool
    first_row: int
    count_resolved: Callable[[], int] | None
    global_step: int
    steps: int = 0
    """Steps trained by this loop."""
    has_rows: bool = True
    started: int = 0
    resolved: dict[str, int] = field(default_factory=lambda: dict.fromkeys(("accepted", "filter", "none", "stale"), 0))
    ready: list[_Ready] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    gate: StalenessController = field(init=False)
    tasks: asyncio.TaskGroup = field(default_factory=asyncio.TaskGroup)

    def __post_init__(self) -> None:
        self.gate = StalenessController(self.rule, slots=self.rule.max_in_flight)
        self.gate.published(0)

    async def run(self) -> None:
        """Start rows while the gate allows it and train whenever a batch is complete.

        Takes:  rows, from the caller.
        Gives:  batches, to `train_fns.train_step`.
        Waits:  for a row to end.
        Ends:   when the rows are exhausted and every group is resolved.
        """
        waited_since = time.monotonic()
        async with self.tasks:
            while True:
                self._start_rows()
                self._drop_stale()
                is_over = not self.has_rows and not self.gate.running
                if len(self.ready) >= self.rule.groups_per_step or (is_over and self.ready):
                    if not (self.is_synchronous and self.gate.running):
                        await self._train(time.monotonic() - waited_since)
                        waited_since = time.monotonic()
                        continue
                elif is_over:
                    return
                self.changed.clear()
                await self.changed.wait()

    def _start_rows(self) -> None:
        while self.has_rows and self.gate.capacity > 0:
            request = next(self.rows, None)
            if request is None:
                self.has_rows = False
                return
            self.gate.begin()
            self.tasks.create_task(self._play(request, self.gate.version or 0), name=f"recipe.row.{request.row_id}")

    async def _play(self, request: RowRequest, version: int) -> None:
        draw, self.started = self.started, self.started + 1
        async with asyncio.TaskGroup() as episodes:
            playing = [
                episodes.create_task(_sample(request, number), name=f"recipe.sample.{request.row_id}.{number}")
                for number in range(self.completions_per_prompt)
            ]
        samples = [sample for one in playing if (sample := one.result()) is not None and sample.is_scorable]
        group = None
        if len(samples) >= self.min_group_size:
            rollout = Rollout(samples, request.row_meta)
            group = rollout_to_prompt_group(rollout, advantage_fn=self.advantage_fn, row_id=request.row_id, draw=draw)
        if group is not None and self.keep(group):
            self.gate.settled(is_accepted=True)
            self.ready.append(_Ready(request=request, group=group, version=version))
        else:
            self.gate.settled(is_accepted=False)
            self._resolve(request, "none" if group is None else "filter")
        self._start_rows()  # even while a batch is trained
        self.changed.set()

    def _drop_stale(self) -> None:
        step = self.steps + 1
        for one in [one for one in self.ready if not self.rule.is_fresh(step=step, oldest_version=one.version)]:
            self.ready.remove(one)
            self.gate.dropped()
            self._resolve(one.request, "stale")

    async def _train(self, waited_s: float) -> None:
        # Older groups first: they would be stale sooner.
        self.ready.sort(key=lambda one: one.version)
        batch, self.ready = self.ready[: self.rule.groups_per_step], self.ready[self.rule.groups_per_step :]
        for one in batch:
            self._resolve(one.request, "accepted")
        lags = [self.steps - one.version for one in batch]
        stats = {
            "async/version_offset_mean": sum(lags) / len(lags),
            "async/version_offset_max": max(lags),
            "async/version_offset_min": min(lags),
            "async/in_flight": self.gate.running * self.completions_per_prompt,
            "async/staleness_capacity": self.gate.capacity,
            "async/stale_drops": self.resolved["stale"],
            "async/filter_drops": self.resolved["filter"],
            "async/sample_fails": self.resolved["none"],
            "perf/sample_wait_time": waited_s,
            "all_raw_rewards": [sample.reward for one in batch for sample in one.group.samples],
            "valid_prompt_groups": len(batch),
            "resolved_rows": self._num_resolved(),
        }
        groups = [one.group for one in batch]
        self.global_step, _ = await asyncio.to_thread(self.train_fns.train_step, self.global_step, groups, stats)
        self.steps += 1
        self.gate.batch_taken(len(batch))
        if self.publish is None:
            self.gate.published(self.steps)
        elif self.steps % self.publish_every == 0:
            await asyncio.to_thread(self.publish, self.global_step)
            self.gate.published(self.steps)

    def _resolve(self, request: RowRequest, reason: str) -> None:
        self.resolved[reason] += 1
        if request.on_resolved is not None:
            request.on_resolved(reason)

    def _num_resolved(self) -> int:
        return self.first_row + sum(self.resolved.values()) if self.count_resolved is None else self.count_resolved()

    def totals(self) -> dict[str, Any]:
        return {
            "total_accepted": self.resolved["accepted"],
            "filter_drops": self.resolved["filter"],
            "sample_fails": self.resolved["none"],
            "stale_drops": self.resolved["stale"],
            "resolved_rows": self._num_resolved(),
        }


async def _sample(request: RowRequest, number: int) -> RolloutSample | None:
    return await request.sample_factory(number)
