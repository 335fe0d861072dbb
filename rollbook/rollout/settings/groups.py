"""How the samples of a draw become a group: the rules, and the decision, in pure code."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rollbook.contracts.group import DropKind, DropReason
from rollbook.contracts.trajectory import RolloutSample

SHOWN_CAUSES = 3
"""Causes listed in a drop reason; the outcome has them all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRules:
    completions_per_prompt: int
    min_samples: int = 2
    retry_budget: int = 4
    max_seconds: float = 120.0
    step_s: float = 120.0
    open_s: float = 300.0
    grace_s: float = 5.0
    drop_constant_reward: bool = True
    filter: str | None = None
    oversample: int = 0
    """Episodes started beyond the size of the group; what is too much in the end is surplus."""

    def __post_init__(self) -> None:
        if not 1 <= self.min_samples <= self.completions_per_prompt:
            raise ValueError(
                f"min_samples is {self.min_samples}; it must lie between 1 and completions_per_prompt "
                f"({self.completions_per_prompt})"
            )
        if self.retry_budget < 0:
            raise ValueError(f"retry_budget is {self.retry_budget}; it must be >= 0")
        if self.oversample < 0:
            raise ValueError(f"oversample is {self.oversample}; it must be >= 0")

    @property
    def samples_started(self) -> int:
        return self.completions_per_prompt + self.oversample

    def choose(self, samples: Sequence[RolloutSample]) -> tuple[tuple[RolloutSample, ...], int]:
        """The samples that make the group, scorable ones first where there are too many, and how many are surplus."""
        if len(samples) <= self.completions_per_prompt:
            return tuple(samples), 0
        ranked = sorted(range(len(samples)), key=lambda i: (not samples[i].is_scorable, i))
        kept = sorted(ranked[: self.completions_per_prompt])
        return tuple(samples[i] for i in kept), len(samples) - len(kept)

    def missing_floor(self, *, scorable: int, declined: int, causes: Mapping[str, int]) -> DropReason | None:
        """Why these samples make no group; None when there are enough. Nothing but declined samples is no failure."""
        if scorable >= self.min_samples:
            return None
        told = f"{scorable} of {self.completions_per_prompt} samples scorable, the floor is {self.min_samples}"
        if declined:
            told += f"; rollout returned None for {declined}"
        if not causes:
            return DropReason(DropKind.FILTERED, f"declined: {told}")
        return DropReason(DropKind.INVALID, f"{told} ({tell_causes(causes)})")


def tell_causes(causes: Mapping[str, int], *, most: int = SHOWN_CAUSES) -> str:
    """`5 x rollout raised ValueError: no; 1 x env: connection lost`: the commonest first."""
    ranked = sorted(causes.items(), key=lambda item: -item[1])
    told = "; ".join(f"{count} x {cause}" for cause, count in ranked[:most])
    return told if len(ranked) <= most else f"{told}; and {len(ranked) - most} further causes"
