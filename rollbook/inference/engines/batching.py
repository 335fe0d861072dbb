"""Which requests run together next, and in how much memory. Pure arithmetic over lengths; the engines own the requests."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

FORWARD_COST_TOKENS = 64
"""What a forward costs beside its tokens, in tokens. Measured with 0.8M parameters on a CPU core: 1.5 ms against 20 us a token."""
LENGTH_STEP = 64
"""Positions are added to slots in steps of this many, so that growing (a copy) is rare."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotBudget:
    """How many slots of which length the cache may have. All slots are equally long: rows times length never exceeds the budget."""

    max_rows: int
    max_length: int
    max_tokens: int
    """Positions of all slots together. At least one slot of full length must fit."""

    def __post_init__(self) -> None:
        if min(self.max_rows, self.max_length) < 1 or self.max_tokens < self.max_length:
            raise ValueError(
                f"a cache of {self.max_tokens} positions does not hold one sequence of {self.max_length}; "
                "give it more memory or shorten the sequences"
            )

    def length_for(self, needed: int) -> int:
        """The slot length that holds `needed` positions."""
        return min(self.max_length, -(-needed // LENGTH_STEP) * LENGTH_STEP)

    def rows_for(self, needed: int) -> int:
        """Slots there may be when the longest row needs so many positions. At least one."""
        return min(self.max_rows, self.max_tokens // self.length_for(needed))


def joinable(
    lengths: Iterable[int], *, running: int, longest: int, budget: SlotBudget, max_tokens: int, free_slots: int
) -> int:
    """How many of the waiting requests, in order, get a slot before the next round.

    `lengths`: positions each needs for its first token; `longest`: what the longest running row needs. Nobody is admitted whose
    length would push a running row out: it waits until enough have left, and everybody behind it waits, too, so that it is
    not overtaken for ever. One that is longer than `max_tokens` joins alone and is prefilled in pieces.
    """
    joined, tokens = 0, 0
    for length in lengths:
        longest = max(longest, length)
        if joined >= free_slots or (joined and tokens + length > max_tokens):
            break
        if running + joined + 1 > budget.rows_for(longest):
            break
        joined += 1
        tokens += length
    return joined


def excess(*, running: int, longest: int, budget: SlotBudget) -> int:
    """Rows that must leave before the longest row can grow to `longest` positions. The youngest go first."""
    return max(0, running - budget.rows_for(longest))


def is_worth_prefilling(*, waiting: int, free_slots: int, running: int, rounds_waited: int, gather: int) -> bool:
    """Whether to interrupt decoding for a prefill now, or gather more newcomers first.

    A prefill costs nearly the same for one row as for several. With `gather` 0 nobody ever waits for company. Otherwise newcomers
    wait for at most `gather` others, and never longer than that many rounds.
    """
    if not waiting or not free_slots:
        return False
    if not gather or not running:
        return True
    enough = min(gather, max(1, running // 16))
    return min(waiting, free_slots) >= enough or rounds_waited >= enough


def admissible(prompt_lengths: Iterable[int], *, free_slots: int, max_tokens: int) -> int:
    """How many of the waiting requests, in order, join before the next decode step.

    At least one when a slot is free, however long it is: nothing may wait forever behind its own size.
    """
    admitted, tokens = 0, 0
    for length in prompt_lengths:
        if admitted >= free_slots or (admitted and tokens + length > max_tokens):
            break
        admitted += 1
        tokens += length
    return admitted


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens `start` to `end` of the `index`-th sequence, to be prefilled in one forward."""

    index: int
    start: int
    end: int

    @property
    def length(self) -> int:
        return self.end - self.start


def pieces_of_round(remaining: Sequence[tuple[int, int]], *, max_tokens: int, piece_tokens: int) -> list[list[Piece]]:
    """What of the sequences (done, total) is prefilled in this round: waves of pieces, each sequence at most once a wave.

    In order, at most `max_tokens` in all, at least something: who came first is ready first. A later wave builds on an earlier one.
    """
    waves: list[list[Piece]] = []
    left = max_tokens
    for index, (begun, total) in enumerate(remaining):
        done, wave = begun, 0
        while done < total and left > 0:
            end = min(total, done + min(piece_tokens, left))
            if wave == len(waves):
                waves.append([])
            waves[wave].append(Piece(index, done, end))
            left -= end - done
            done = end
            wave += 1
    return waves


def prefill_forwards(
    lengths: Sequence[int], *, max_tokens: int, forward_cost: int = FORWARD_COST_TOKENS
) -> list[list[int]]:
    """Indices of the rows that share a padded forward.

    Rows of like length go together. A forward is closed when it would exceed `max_tokens`, padding included, or when the padding
    that the next row brings would cost more than another forward does.
    """
    forwards: list[list[int]] = []
    current: list[int] = []
    longest, padding = 0, 0
    for index in sorted(range(len(lengths)), key=lengths.__getitem__):
        length = lengths[index]
        added = len(current) * (length - longest)
        if current and ((len(current) + 1) * length > max_tokens or padding + added > forward_cost):
            forwards.append(current)
            current, padding, added = [], 0, 0
        current.append(index)
        longest, padding = length, padding + added
    if current:
        forwards.append(current)
    return forwards


def compaction(kept: Sequence[bool]) -> list[tuple[int, int]]:
    """Moves (from, to) after which the kept rows lie at the front, each hole filled by the last kept row beyond it."""
    keep = sum(kept)
    holes = [row for row in range(keep) if not kept[row]]
    beyond = [row for row in range(len(kept) - 1, keep - 1, -1) if kept[row]]
    return list(zip(beyond, holes, strict=True))
