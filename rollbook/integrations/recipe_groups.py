"""Groups of the asynchronous recipe: samples of a row become a `PromptGroup` with advantages.

`GroupAssembler` joins samples that arrive one by one, by the id of their row, in a loop of the caller. It plays nothing.
"""

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np

from rollbook.contracts.group import PromptGroup, group_id
from rollbook.contracts.task import TaskId
from rollbook.contracts.trajectory import RolloutSample
from rollbook.trainer.advantages.episodes import group_relative

AdvantageFn: TypeAlias = Callable[[list[float]], Sequence[float]]
"""Takes the rewards of a group; returns one advantage for each."""


def refuse_unsupported(**options: bool) -> None:
    for name, is_set in options.items():
        if is_set:
            raise ValueError(f"{name} is not supported: compute reference logprobs and routing in train_step")


@dataclass(slots=True)
class Rollout:
    """The samples of one row."""

    samples: Sequence[RolloutSample]
    row_meta: Mapping[str, Any] | None = None


def compute_advantages(rewards: list[float]) -> Sequence[float]:
    """(r - mean) / std, as in GRPO. A single sample has advantage 0."""
    return group_relative(np.array(rewards)).tolist() if len(rewards) > 1 else [0.0]


def rollout_to_prompt_group(
    rollout: Rollout,
    *,
    advantage_fn: AdvantageFn = compute_advantages,
    row_id: Hashable = "row",
    draw: int = 0,
) -> PromptGroup | None:
    """The samples of a row as a group whose trained tokens carry their advantages. None: an advantage is not finite.

    The metadata of the row is in `facts["row_meta"]` of every sample.
    """
    if not rollout.samples:
        raise ValueError(f"row {row_id!r}: the rollout is empty, it has no samples")
    rewards = [sample.reward for sample in rollout.samples if sample.reward is not None]
    if len(rewards) < len(rollout.samples):
        raise ValueError(f"row {row_id!r}: a sample has no reward; leave unscorable samples out")
    advantages = list(advantage_fn(rewards))
    if len(advantages) != len(rewards):
        raise ValueError(f"advantage_fn returned {len(advantages)} advantages for {len(rewards)} rewards")
    if not all(map(math.isfinite, advantages)):
        return None
    samples = tuple(
        _with_advantage(sample, advantage, rollout.row_meta)
        for sample, advantage in zip(rollout.samples, advantages, strict=True)
    )
    task_id = TaskId(str(row_id))
    return PromptGroup(id=group_id(task_id, draw), task_id=task_id, draw=draw, samples=samples)


def _with_advantage(sample: RolloutSample, advantage: float, row_meta: Mapping[str, Any] | None) -> RolloutSample:
    sequences = tuple(
        row if row.advantages is not None else row.with_columns(advantages=np.full(len(row), advantage))
        for row in sample.sequences
    )
    facts = sample.facts if row_meta is None else {**sample.facts, "row_meta": dict(row_meta)}
    return replace(sample, sequences=sequences, facts=facts)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowResolution:
    """A row whose samples have all ended. `pg` is None if too few are scorable, or an advantage is not finite."""

    pg: PromptGroup | None
    min_submit_version: int
    """The oldest version under which a sample of the row was started."""


@dataclass(slots=True)
class _PendingRow:
    row_meta: dict[str, Any] | None
    draw: int
    versions: list[int] = field(default_factory=list)
    samples: list[RolloutSample] = field(default_factory=list)
    dropped: int = 0


class GroupAssembler:
    """Joins the samples of each row into a group, by row id. Not thread-safe: call it from one event loop.

    Call `note_started` for each sample that starts, then `add_sample` or `note_dropped` when it ends. The call that ends the last
    sample of a row returns its `RowResolution`; the others return None. A row id may be used again once its row is resolved.
    """

    def __init__(
        self,
        *,
        completions_per_prompt: int,
        advantage_fn: AdvantageFn = compute_advantages,
        with_reference: bool = False,
        router_replay_completion_only: bool = False,
        min_group_size: int = 1,
    ) -> None:
        if not 1 <= min_group_size <= completions_per_prompt:
            raise ValueError(
                f"min_group_size is {min_group_size}; it must be between 1 and completions_per_prompt = {completions_per_prompt}"
            )
        refuse_unsupported(with_reference=with_reference, router_replay_completion_only=router_replay_completion_only)
        self._num_samples = completions_per_prompt
        self._min_group_size = min_group_size
        self._advantage_fn = advantage_fn
        self._pending: dict[Hashable, _PendingRow] = {}
        self._num_rows = 0

    def note_started(self, row_id: Hashable, *, submit_version: int, row_meta: dict[str, Any] | None = None) -> None:
        """One sample of the row starts, under this version of the policy. The first call of a row sets its metadata."""
        row = self._pending.get(row_id)
        if row is None:
            row = self._pending[row_id] = _PendingRow(row_meta=row_meta, draw=self._num_rows)
            self._num_rows += 1
        if len(row.versions) == self._num_samples:
            raise ValueError(f"row {row_id!r}: all {self._num_samples} samples of it were started already")
        row.versions.append(submit_version)

    def add_sample(self, row_id: Hashable, sample: RolloutSample) -> RowResolution | None:
        """A sample ended. One without a reward counts as dropped."""
        row = self._running(row_id)
        if sample.is_scorable:
            row.samples.append(sample)
        else:
            row.dropped += 1
        return self._resolved(row_id, row)

    def note_dropped(self, row_id: Hashable) -> RowResolution | None:
        """A sample ended without a result."""
        row = self._running(row_id)
        row.dropped += 1
        return self._resolved(row_id, row)

    def pending_rows(self) -> int:
        """Rows with samples that have not ended."""
        return len(self._pending)

    def drain(self) -> list[RowResolution]:
        """Resolve all pending rows with the samples they have. Returns those that make a group."""
        resolved = [self._resolve(row_id, row) for row_id, row in list(self._pending.items())]
        return [one for one in resolved if one.pg is not None]

    def _running(self, row_id: Hashable) -> _PendingRow:
        row = self._pending.get(row_id)
        if row is None or len(row.samples) + row.dropped == len(row.versions):
            raise KeyError(
                f"row {row_id!r} has no running sample; call note_started before add_sample and note_dropped"
            )
        return row

    def _resolved(self, row_id: Hashable, row: _PendingRow) -> RowResolution | None:
        is_complete = len(row.samples) + row.dropped == self._num_samples
        return self._resolve(row_id, row) if is_complete else None

    def _resolve(self, row_id: Hashable, row: _PendingRow) -> RowResolution:
        del self._pending[row_id]
        group = None
        if len(row.samples) >= self._min_group_size:
            rollout = Rollout(row.samples, row.row_meta)
            group = rollout_to_prompt_group(rollout, advantage_fn=self._advantage_fn, row_id=row_id, draw=row.draw)
        return RowResolution(pg=group, min_submit_version=min(row.versions))
