"""What one episode may use: turns, tokens, seconds; and which end that means.

Reaching a limit is something the policy did, so it is an outcome with a reward, never an infrastructure failure: an episode that
stalls and is discarded would teach the policy to stall.
"""

from dataclasses import dataclass

from rollbook.contracts.trajectory import EndReason


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeLimits:
    max_turns: int = 6
    max_total_tokens: int = 4096
    """Prompt, completions and observations of one sequence together."""
    max_seconds: float = 120.0

    def __post_init__(self) -> None:
        if self.max_turns < 1 or self.max_total_tokens < 2 or not self.max_seconds > 0:
            raise ValueError(
                f"an episode needs a turn, two tokens and some time, got max_turns={self.max_turns}, "
                f"max_total_tokens={self.max_total_tokens}, max_seconds={self.max_seconds}"
            )

    def tokens_left(self, num_tokens: int) -> int:
        """Tokens the policy may still sample after a prompt of `num_tokens`."""
        return max(0, self.max_total_tokens - num_tokens)

    def before_turn(self, *, turns: int, num_tokens: int, seconds: float) -> EndReason | None:
        """Why the next turn may not begin; None when it may. `num_tokens` is the length of its prompt."""
        if turns >= self.max_turns:
            return EndReason.MAX_TURNS
        if self.tokens_left(num_tokens) == 0:
            return EndReason.MAX_TOKENS
        if seconds >= self.max_seconds:
            return EndReason.TIME
        return None
