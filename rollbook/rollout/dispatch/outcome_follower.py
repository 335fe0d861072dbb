"""`OutcomeFollower`: reports past draws, and those of other dispatchers of the run, to the task source.

A curriculum chooses by the outcomes of all draws. This dispatcher observes those that it plays; the others are read from the
ledger.
"""

from rollbook.contracts.admission import PastDraw
from rollbook.contracts.group import GroupId, GroupState
from rollbook.contracts.ports import GroupSink, TaskSource

PAGE = 1000
"""Past draws in one response: some hundred kilobytes."""


class OutcomeFollower:
    """Reports each draw when it is first read, and once more when it is settled. Draws that are played here are left out."""

    def __init__(self, tasks: TaskSource, sink: GroupSink) -> None:
        self._tasks = tasks
        self._sink = sink
        self._after = -1
        """Every draw up to this admission sequence is settled and reported."""
        self._is_settled: dict[int, bool] = {}
        """The draws above it that were read, by sequence. Bounded by the draws since the oldest unsettled one."""
        self._own: set[GroupId] = set()

    def started(self, draw_id: GroupId) -> None:
        """This dispatcher plays the draw and observes its outcome."""
        if self._tasks.needs_history:  # otherwise `update` is not called, and nothing would remove it
            self._own.add(draw_id)

    def released(self, draw_id: GroupId) -> None:
        """This dispatcher released the draw."""
        self._own.discard(draw_id)

    async def update(self) -> None:
        """Page by page, so that a long history is never in memory at once."""
        after = self._after
        while past := await self._sink.outcomes(after=after, limit=PAGE):
            self._tasks.recall([draw for draw in past if self._is_news(draw)])
            self._forget_settled()
            # Draws that were forgotten must not be read again.
            after = max(past[-1].sequence, self._after)

    def _is_news(self, draw: PastDraw) -> bool:
        known, is_settled = self._is_settled.get(draw.sequence), draw.state is not GroupState.DISPATCHED
        self._is_settled[draw.sequence] = is_settled
        if draw.group_id in self._own:
            if is_settled:
                self._own.discard(draw.group_id)
            return False
        return known is None or (is_settled and not known)

    def _forget_settled(self) -> None:
        for sequence in sorted(self._is_settled):
            if not self._is_settled[sequence]:
                return
            del self._is_settled[sequence]
            self._after = sequence
