"""Which finished samples of a group are submitted together. Pure.

A whole group is one part: it is complete when all of its episodes have ended, and its samples are in the order of the episodes.
With batch policy `parts`, the first part is complete when a quorum of samples is scored. From then on every finished sample is
submitted without waiting for the others, in the order in which they finished. The rewards of the quorum are the baseline of all
parts: they are fixed before the slow samples are known. Reward functions of groups score the samples of the quorum together, and
every later sample alone, against the quorum.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rollbook.contracts.freshness import is_part_complete
from rollbook.contracts.group import GroupId, PromptGroup, part_id
from rollbook.contracts.task import TaskId
from rollbook.contracts.trajectory import RolloutSample
from rollbook.rollout.settings import is_ready


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
    compared: tuple[RolloutSample, ...] | None = None
    """The quorum, as the reward functions of groups scored it. None: not yet."""
    _finished: list[tuple[int, RolloutSample]] = field(default_factory=list)
    """Finished samples with the numbers of their episodes, in the order in which they finished."""
    _num_ready: int = 0
    """Of those, scored ones and ones that need their group to be scored."""
    _scored: set[int] = field(default_factory=set)
    """Episodes whose samples the functions of groups have scored."""

    @property
    def next_id(self) -> GroupId:
        return part_id(self.group_id, self.number)

    @property
    def is_complete(self) -> bool:
        """Whether the next part need not wait for more samples."""
        if self.quorum is None or not self._finished:
            return False
        return is_part_complete(part=self.number, scorable=self._num_ready, quorum=self.quorum)

    def add(self, episode: int, sample: RolloutSample) -> None:
        self._finished.append((episode, sample))
        self._num_ready += is_ready(sample)

    def to_score(self) -> dict[int, RolloutSample]:
        """Samples that the functions of groups have not scored, by episode: at first those that are scored together (the quorum, or
        the whole group), then late ones."""
        waiting = {n: sample for n, sample in self._finished if is_ready(sample) and n not in self._scored}
        if self.compared is not None:
            return waiting
        if self.quorum is None:
            return dict(sorted(waiting.items())[: self.num_samples])
        return dict(list(waiting.items())[: self.quorum])

    def put_scored(self, scored: Mapping[int, RolloutSample]) -> None:
        self._scored |= scored.keys()
        self._finished = [
            (n, scored.get(n, sample))
            for n, sample in self._finished
            # Surplus samples of a whole group are not compared with it.
            if self.quorum is not None or n in self._scored or not is_ready(sample)
        ]

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
        self._finished, self._num_ready = [], 0
        self.number += 1
        return part


def _select(samples: Sequence[RolloutSample], size: int) -> tuple[RolloutSample, ...]:
    """At most `size` samples in their order; scorable ones are preferred."""
    ranked = sorted(range(len(samples)), key=lambda i: not samples[i].is_scorable)
    return tuple(samples[i] for i in sorted(ranked[:size]))
