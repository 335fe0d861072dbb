"""A ledger of draws in memory, and helpers that drive a curriculum like a dispatcher."""

from collections.abc import Callable, Iterable

from rollbook.contracts.admission import DrawProgress, PastDraw
from rollbook.contracts.group import GroupOutcome, GroupState, group_id
from rollbook.contracts.task import Draw, Task, TaskId
from rollbook.tasks.config import CurriculumConfig
from rollbook.tasks.curriculum import Curriculum


def tiered(*counts: int, **row: object) -> list[Task]:
    """Tasks of tiers 0, 1, …: `tiered(2, 1)` has a0, a1 and b0."""
    letters = "abcdefgh"
    return [
        Task(id=TaskId(f"{letters[tier]}{at}"), row={"tier": tier, **row})
        for tier, count in enumerate(counts)
        for at in range(count)
    ]


def outcome(solved: float | None, *, reward: float | None = None) -> GroupOutcome:
    scored = solved if reward is None else reward
    return GroupOutcome(
        num_samples=4,
        num_scorable=0 if scored is None else 4,
        reward_mean=scored,
        reward_std=0.0,
        solved_rate=solved,
        truncated_rate=0.0,
        mean_turns=1.0,
        mean_response_tokens=1.0,
        seconds=1.0,
    )


class DrawBook:
    """The draws that a ledger stores, and their replay to a curriculum that starts."""

    def __init__(self) -> None:
        self.draws: list[Draw] = []
        self.outcomes: dict[Draw, GroupOutcome | None] = {}

    def open(self, draw: Draw) -> None:
        assert draw not in self.draws, f"{draw} was opened twice"
        self.draws.append(draw)

    def settle(self, draw: Draw, outcome: GroupOutcome | None) -> None:
        self.outcomes[draw] = outcome

    def waiting(self) -> list[Draw]:
        return [draw for draw in self.draws if draw not in self.outcomes]

    def past(self) -> list[PastDraw]:
        return [
            PastDraw(
                group_id=group_id(draw.task_id, draw.number),
                task_id=draw.task_id,
                number=draw.number,
                position=draw.position,
                sequence=sequence,
                state=GroupState.QUEUED if draw in self.outcomes else GroupState.DISPATCHED,
                outcome=self.outcomes.get(draw),
            )
            for sequence, draw in enumerate(self.draws)
        ]

    def replay_to(self, curriculum: Curriculum, *, page: int = 7) -> Curriculum:
        """As a dispatcher does at its start."""
        curriculum.rebuild(DrawProgress(opened_below=len(self.draws)))
        past = self.past()
        for start in range(0, len(past), page):
            curriculum.recall(past[start : start + page])
        return curriculum


def play(curriculum: Curriculum, count: int, success: Callable[[Draw], float | None]) -> list[Draw]:
    """Draw one after the other; each is settled before the next."""
    drawn = []
    for _ in range(count):
        (draw,) = curriculum.propose(1)
        curriculum.taken(1)
        curriculum.observe(group_id(draw.task_id, draw.number), draw.position, outcome(success(draw)))
        drawn.append(draw)
    return drawn


def names(draws: Iterable[Draw]) -> list[str]:
    return [draw.task_id for draw in draws]


def rules(**changed: object) -> CurriculumConfig:
    return CurriculumConfig.model_validate(changed)
