"""The pause state of an engine, and which weight updates it accepts. Pure decisions; the engines act between two forwards.

running --pause(keep|abort)--> paused --resume--> running
running --pause(wait)--> draining --drained--> paused;  draining --resume--> running
"""

from enum import StrEnum

from rollbook.contracts.errors import FencedError
from rollbook.contracts.policy import Publication


class PauseMode(StrEnum):
    KEEP = "keep"
    """Running requests are suspended and continue after resume."""
    WAIT = "wait"
    """Running requests finish first; no new one starts."""
    ABORT = "abort"
    """Running requests end at once with their tokens so far, as `abort`."""


class PauseState(StrEnum):
    RUNNING = "running"
    DRAINING = "draining"
    PAUSED = "paused"


MOVES: dict[PauseState, frozenset[PauseState]] = {
    PauseState.RUNNING: frozenset({PauseState.DRAINING, PauseState.PAUSED}),
    PauseState.DRAINING: frozenset({PauseState.PAUSED, PauseState.RUNNING}),
    PauseState.PAUSED: frozenset({PauseState.RUNNING}),
}


ADOPTED_EPOCH = 0
"""The epoch of weights that an engine was opened with. Trainers count from 1, so any trainer's weights are newer."""


class OutdatedUpdateError(FencedError):
    """A weight update of a replaced trainer, or an older publication."""


class Gate:
    """The pause state machine. Waiting requests are not affected: they start after resume."""

    def __init__(self) -> None:
        self.state = PauseState.RUNNING

    @property
    def may_admit(self) -> bool:
        return self.state is PauseState.RUNNING

    @property
    def may_step(self) -> bool:
        return self.state is not PauseState.PAUSED

    def pause(self, mode: PauseMode) -> None:
        """Idempotent. `keep` and `abort` end a drain in progress."""
        if self.state is PauseState.PAUSED:
            return
        self._move(PauseState.DRAINING if mode is PauseMode.WAIT else PauseState.PAUSED)

    def drained(self) -> None:
        """No request runs."""
        if self.state is PauseState.DRAINING:
            self._move(PauseState.PAUSED)

    def resume(self) -> None:
        self._move(PauseState.RUNNING)

    def _move(self, to: PauseState) -> None:
        if to is self.state:
            return
        if to not in MOVES[self.state]:
            raise ValueError(f"the engine cannot go from {self.state} to {to}")
        self.state = to


def needs_loading(current: Publication | None, offered: Publication) -> bool:
    """False if the offered weights are loaded already. Raises `OutdatedUpdateError` if they are outdated."""
    if current is None or current.epoch == ADOPTED_EPOCH < offered.epoch:
        return True
    if offered.epoch < current.epoch:
        raise OutdatedUpdateError(
            f"publication {offered.id} of epoch {offered.epoch} refused: a trainer of epoch {current.epoch} "
            f"has published {current.id}"
        )
    if offered == current:
        return False
    if offered.id == current.id:
        raise OutdatedUpdateError(
            f"publication {offered.id} refused: it is loaded with digest {current.digest}, epoch {current.epoch}, step "
            f"{current.step}, but was offered again with digest {offered.digest}, epoch {offered.epoch}, step {offered.step}"
        )
    if offered.epoch == current.epoch and offered.id < current.id:
        raise OutdatedUpdateError(f"publication {offered.id} refused: the newer publication {current.id} is loaded")
    return True


def require_unpublished(current: Publication | None, adopted: Publication) -> None:
    """The initial weights of an engine can be adopted only while nothing was published to it. Idempotent."""
    if current is not None and current != adopted:
        raise OutdatedUpdateError(
            f"publication {adopted.id} refused: {current.id} was published to this engine already"
        )
