"""Built-in reward functions of groups: `path = "diversity"`, `path = "pass_at_4"`.

Each takes the cases of a group and returns a value for each. For a late sample of a group in parts, the cases are those of the
quorum and, as the last one, that of the late sample; only its value counts.
"""

import math
from collections.abc import Callable, Sequence
from statistics import fmean

from rollbook.rollout.rewards.messages import RewardCase

SHINGLE = 3
"""Words in a row that are compared."""


def diversity(cases: Sequence[RewardCase]) -> list[float]:
    """How much the last text of a sample differs from those of the others, from 0 (all equal) to 1 (nothing in common).

    One minus the Jaccard similarity of their runs of three words, averaged over the others. The only sample of a group gets 1.
    """
    found = [_shingles(case.response) for case in cases]
    return [
        fmean([_distance(own, other) for j, other in enumerate(found) if j != i] or [1.0])
        for i, own in enumerate(found)
    ]


def pass_at(k: int) -> Callable[[Sequence[RewardCase]], list[float]]:
    """The credit of each sample for pass@k: the chance that k samples of the group, this one among them, contain a solved one.

    A solved sample gets 1. One that is not solved gets the chance that k - 1 of the others contain a solved one. Times k, the mean
    over the group is an unbiased estimate of the gradient of pass@k (arXiv:2505.15201).
    """
    if k < 1:
        raise ValueError(f"pass@k needs at least one sample, got k = {k}")

    def credit(cases: Sequence[RewardCase]) -> list[float]:
        if any(case.solved is None for case in cases):
            raise ValueError(
                "pass@k needs to know which samples are solved: name the function that decides it in "
                "rollout.rewards.solved_by, or use an environment that reports it"
            )
        others, drawn = len(cases) - 1, min(k, len(cases)) - 1
        unsolved = sum(not case.solved for case in cases)
        shared = 1.0 - math.comb(unsolved - 1, drawn) / math.comb(others, drawn) if unsolved else 1.0
        return [1.0 if case.solved else shared for case in cases]

    return credit


pass_at_2, pass_at_4, pass_at_8 = pass_at(2), pass_at(4), pass_at(8)


def _shingles(text: str) -> set[tuple[str, ...]]:
    words = text.lower().split()
    return {tuple(words[at : at + SHINGLE]) for at in range(max(1, len(words) - SHINGLE + 1))}


def _distance(one: set[tuple[str, ...]], other: set[tuple[str, ...]]) -> float:
    return 1.0 - len(one & other) / len(one | other)
