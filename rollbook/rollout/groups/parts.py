"""Which finished samples of a group are submitted together, with batch policy `parts`. Pure.

The first part is complete when a quorum of samples is scored. From then on every finished sample is submitted without waiting for
the others. The rewards of the quorum are the baseline of all parts: they are fixed before the slow samples are known.
"""

from dataclasses import dataclass, field

from rollbook.contracts.admission import OpenPart
from rollbook.contracts.freshness import is_part_complete
from rollbook.contracts.group import GroupId, PromptGroup, part_id
from rollbook.contracts.task import TaskId
from rollbook.contracts.trajectory import RolloutSample


@dataclass(slots=True, kw_only=True)
class GroupParts:
    """The parts of one attempt. `number` and `baseline` are those of the next part."""

    group_id: GroupId
    task_id: TaskId
    draw: int
    quorum: int
    number: int = 1
    baseline: tuple[float, ...] | None = None
    _waiting: list[RolloutSample] = field(default_factory=list)
    """Finished samples, in the order in which they finished."""

    @classmethod
    def begin(cls, part: OpenPart, *, group_id: GroupId, task_id: TaskId, draw: int, quorum: int) -> "GroupParts":
        return cls(
            group_id=group_id,
            task_id=task_id,
            draw=draw,
            quorum=quorum,
            number=part.number,
            baseline=part.baseline,
        )

    def add(self, sample: RolloutSample) -> None:
        self._waiting.append(sample)

    @property
    def has_quorum(self) -> bool:
        """Whether the next part can be submitted now."""
        scorable = sum(sample.is_scorable for sample in self._waiting)
        return is_part_complete(part=self.number, scorable=scorable, quorum=self.quorum)

    def take(self, *, is_last: bool) -> PromptGroup | None:
        """The next part. None: nothing is finished, or the quorum is not reached and other episodes still run."""
        if not self._waiting or not (self.has_quorum or is_last):
            return None
        if self.baseline is None:
            rewards = [sample.reward for sample in self._waiting if sample.reward is not None]
            self.baseline = tuple(map(float, rewards[: self.quorum]))
        samples, self._waiting = tuple(self._waiting), []
        number, self.number = self.number, self.number + 1
        return PromptGroup(
            id=part_id(self.group_id, number),
            task_id=self.task_id,
            draw=self.draw,
            samples=samples,
            part=number,
            baseline=self.baseline,
        )
