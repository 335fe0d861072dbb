"""Whether the engine may run, and which weights it may take. Pure: the engines carry it out between two forwards.

running --pause(keep|abort)--> paused --resume--> running
running --pause(wait)--> draining --drained--> paused;  draining --resume--> running
"""

from enum import StrEnum

from rollbook.contracts.errors import FencedError
from rollbook.contracts.policy import Publication


class PauseMode(StrEnum):
    KEEP = "keep"
    """Running requests stand still and go on after resume."""
    WAIT = "wait"
    """Running requests finish first; no new one begins."""
    ABORT = "abort"
    """Running requests end at once with what they have, as `abort`."""


class GateState(StrEnum):
    RUNNING = "running"
    DRAINING = "draining"
    PAUSED = "paused"


MOVES: dict[GateState, frozenset[GateState]] = {
    GateState.RUNNING: frozenset({GateState.DRAINING, GateState.PAUSED}),
    GateState.DRAINING: frozenset({GateState.PAUSED, GateState.RUNNING}),
    GateState.PAUSED: frozenset({GateState.RUNNING}),
}


ADOPTED_EPOCH = 0
"""Of weights that an engine was opened with and no trainer published. Any trainer's come after them; trainers count from 1."""


class OutdatedUpdateError(FencedError):
    """A weight update of a trainer, or of a moment, that is over."""


class Gate:
    """The engine's own view of pause and resume. Requests that wait are never touched: they begin after resume."""

    def __init__(self) -> None:
        self.state = GateState.RUNNING

    @property
    def may_admit(self) -> bool:
        return self.state is GateState.RUNNING

    @property
    def may_step(self) -> bool:
        return self.state is not GateState.PAUSED

    def pause(self, mode: PauseMode) -> None:
        """Repeating it is harmless; keep and abort overrule a drain that is under way."""
        if self.state is GateState.PAUSED:
            return
        self._move(GateState.DRAINING if mode is PauseMode.WAIT else GateState.PAUSED)

    def drained(self) -> None:
        """Nothing runs any more."""
        if self.state is GateState.DRAINING:
            self._move(GateState.PAUSED)

    def resume(self) -> None:
        self._move(GateState.RUNNING)

    def _move(self, to: GateState) -> None:
        if to is self.state:
            return
        if to not in MOVES[self.state]:
            raise ValueError(f"the engine cannot go from {self.state} to {to}")
        self.state = to


def needs_loading(current: Publication | None, offered: Publication) -> bool:
    """Whether offered weights are to be loaded. False: they are here already. Raises where they are outdated."""
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
            f"{current.step}, and was offered again with digest {offered.digest}, epoch {offered.epoch}, step {offered.step}"
        )
    if offered.epoch == current.epoch and offered.id < current.id:
        raise OutdatedUpdateError(f"publication {offered.id} refused: the newer publication {current.id} is loaded")
    return True


def require_unpublished(current: Publication | None, adopted: Publication) -> None:
    """Weights an engine was opened with may be named while nothing was published to it. Naming them again alike is harmless."""
    if current is not None and current != adopted:
        raise OutdatedUpdateError(
            f"publication {adopted.id} refused: {current.id} was published to this engine already"
        )
