"""Which finished samples of a group are submitted together. Pure.

A whole group is one part: it is complete when all of its episodes have ended, and its samples are in the order of the episodes.
With batch policy `parts`, the first part is complete when a quorum of samples is scored. From then on every finished sample is
submitted without waiting for the others, in the order in which they finished. The rewards of the quorum are the baseline of all
parts: they are fixed before the slow samples are known.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from rollbook.contracts.freshness import is_part_complete
from rollbook.contracts.group import GroupId, PromptGroup, part_id
from rollbook.contracts.task import TaskId
from rollbook.contracts.trajectory import RolloutSample


@dataclass(slots=True, kw_only=True)
class GroupParts:
    """The parts of one attempt. `number` and `baseline` are those of the next part."""

    group_id: GroupId
    """The id of the whole group."""
    task_id: TaskId
    draw: int
    num_samples: int
    """The samples that the group lacks."""
    num_surplus: int = 0
    """Episodes that are played in addition (over-sampling). Only for a whole group."""
    quorum: int | None = None
    """None: the group is one part."""
    number: int = 1
    baseline: tuple[float, ...] | None = None
    _finished: list[tuple[int, RolloutSample]] = field(default_factory=list)
    """Finished samples with the numbers of their episodes, in the order in which they finished."""

    @property
    def next_id(self) -> GroupId:
        return part_id(self.group_id, self.number)

    @property
    def is_complete(self) -> bool:
        """Whether the next part need not wait for more samples."""
        scorable = sum(sample.is_scorable for _, sample in self._finished)
        if self.quorum is None or not self._finished:
            return False
        return is_part_complete(part=self.number, scorable=scorable, quorum=self.quorum)

    def add(self, episode: int, sample: RolloutSample) -> None:
        self._finished.append((episode, sample))

    def take(self, *, is_last: bool) -> PromptGroup | None:
        """The next part. None: nothing is finished, or the part is not complete and other episodes still run."""
        if not self._finished or not (self.is_complete or is_last):
            return None
        if self.quorum is None:
            samples = _select(
                [sample for _, sample in sorted(self._finished, key=lambda one: one[0])], self.num_samples
            )
        else:
            samples = tuple(sample for _, sample in self._finished)
            if self.baseline is None:
                rewards = [sample.reward for sample in samples if sample.reward is not None]
                self.baseline = tuple(map(float, rewards[: self.quorum]))
        part = PromptGroup(
            id=self.next_id,
            task_id=self.task_id,
            draw=self.draw,
            samples=samples,
            part=self.number,
            baseline=self.baseline,
        )
        self._finished = []
        self.number += 1
        return part


def _select(samples: Sequence[RolloutSample], size: int) -> tuple[RolloutSample, ...]:
    """At most `size` samples in their order; scorable ones are preferred."""
    ranked = sorted(range(len(samples)), key=lambda i: not samples[i].is_scorable)
    return tuple(samples[i] for i in sorted(ranked[:size]))
