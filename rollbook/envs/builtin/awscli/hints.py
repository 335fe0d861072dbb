"""Hints: three levels, each dearer than none. The price is a factor on everything the episode can still be worth."""

from collections.abc import Sequence

from rollbook.envs.builtin.awscli.task_bank import NUM_HINTS


def factor(used: int, price: float) -> float:
    """What is left of the value after `used` hints: 0.85, 0.7225, 0.614... at the usual price of 0.85."""
    if not 0 <= used <= NUM_HINTS:
        raise ValueError(f"{used} hints used; there are {NUM_HINTS}")
    return float(price**used)


def hint_text(hints: Sequence[str], used: int, price: float) -> str:
    """The next hint after `used`, with its price, or that there is none left."""
    if used >= len(hints):
        return "there are no further hints"
    return f"hint {used + 1} of {len(hints)} (the reward is now multiplied by {factor(used + 1, price):.3g}): {hints[used]}"
