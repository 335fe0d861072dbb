"""How many slots there are and how long they are: grown to what is needed, within the budget, gaps closed where it pays."""

from rollbook.inference.engines.batching import SlotBudget, compaction, excess
from rollbook.inference.engines.embedded.row_table import RowTable
from rollbook.inference.engines.embedded.runner import Runner
from rollbook.inference.request import Request


class Room:
    """Keeps the slots of a runner as its rows need them."""

    def __init__(self, runner: Runner, table: RowTable, budget: SlotBudget, *, min_rows: int, min_length: int) -> None:
        self._runner = runner
        self._slots = runner.slots
        self._table = table
        self._budget = budget
        self._min_rows, self._min_length = min_rows, min_length

    def youngest_beyond(self, longest: int) -> list[Request]:
        """Who must leave before the longest row can grow to so many positions."""
        over = excess(running=self._table.num_owned, longest=longest, budget=self._budget)
        if not over:
            return []
        return sorted(self._table.requests(), key=lambda request: request.order)[-over:]

    def fit(self, length: int, *, round_number: int) -> None:
        """Grow the slots when they are too few or too short. Where both do not fit, they get no longer than they must be."""
        budget, slots = self._budget, self._slots
        rows = self._table.extent
        if rows <= slots.rows and length <= slots.length:
            return
        if rows > budget.rows_for(length):
            self.compact(round_number, is_forced=True)
            rows = self._table.num_owned
        # In big steps: growing copies everything, and whatever was captured is captured again.
        new_length = slots.length if length <= slots.length else max(length, self._min_length, slots.length * 5 // 4)
        new_length = budget.length_for(new_length)
        if budget.rows_for(new_length) < max(rows, min(self._min_rows, budget.rows_for(length))):
            new_length = budget.length_for(length)
        new_rows = max(rows, self._min_rows, slots.rows if rows <= slots.rows else 2 * slots.rows)
        slots.resize(min(new_rows, budget.rows_for(new_length)), new_length)

    def compact(self, round_number: int, *, is_forced: bool = False) -> int:
        """Close gaps between rows where that makes the step smaller. Gives the rows a decode must cover."""
        table = self._table
        extent = table.extent
        if extent == table.num_owned or not (is_forced or self._runner.is_smaller(table.num_owned, extent)):
            return extent
        moves = compaction(table.holes(extent))
        sources, targets = [source for source, _ in moves], [target for _, target in moves]
        length = min(self._slots.length, int(table.positions[sources].max()) + 1)
        self._slots.copy_rows(sources, targets, length=length)
        self._runner.move_tokens(sources, targets)
        for source, target in moves:
            request: Request = table.owners[source]
            if request.segments:
                request.segments = [
                    *request.segments[:-1],
                    (*request.segments[-1][:2], round_number),
                    (target, round_number, None),
                ]
            table.move(source, target)
        return table.extent
