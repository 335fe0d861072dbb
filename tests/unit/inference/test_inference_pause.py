"""Pause, resume, and which weight updates an engine accepts."""

import pytest

from rollbook.inference.pause import Gate, OutdatedUpdateError, PauseMode, PauseState, needs_loading
from tests.parts.inference.models import publication


@pytest.mark.parametrize("mode", [PauseMode.KEEP, PauseMode.ABORT])
def test_keep_and_abort_stop_at_once(mode: PauseMode) -> None:
    gate = Gate()
    gate.pause(mode)
    assert gate.state is PauseState.PAUSED
    assert not gate.may_admit
    assert not gate.may_step


def test_wait_continues_stepping_until_no_request_runs() -> None:
    gate = Gate()
    gate.pause(PauseMode.WAIT)
    assert gate.may_step
    assert not gate.may_admit
    gate.drained()
    assert gate.state is PauseState.PAUSED
    gate.resume()
    assert gate.may_admit


def test_drained_has_no_effect_on_a_gate_that_is_not_draining() -> None:
    gate = Gate()
    gate.drained()
    assert gate.state is PauseState.RUNNING


def test_keep_ends_a_drain_in_progress() -> None:
    gate = Gate()
    gate.pause(PauseMode.WAIT)
    gate.pause(PauseMode.KEEP)
    assert gate.state is PauseState.PAUSED


def test_the_first_weights_are_always_accepted() -> None:
    assert needs_loading(None, publication(0, "a"))


def test_the_same_publication_is_not_loaded_twice() -> None:
    assert not needs_loading(publication(4, "a"), publication(4, "a"))


@pytest.mark.parametrize(
    ("offered", "message"),
    [
        (publication(9, "b", epoch=1), "epoch"),
        (publication(3, "b", epoch=2), "newer publication 4"),
        (publication(4, "b", epoch=2), "digest a"),
        (publication(4, "a", epoch=3), "offered again"),
    ],
)
def test_outdated_or_contradicting_weights_are_refused(offered: object, message: str) -> None:
    with pytest.raises(OutdatedUpdateError, match=message):
        needs_loading(publication(4, "a", epoch=2), offered)  # type: ignore[arg-type]


def test_a_newer_trainer_or_publication_is_accepted() -> None:
    assert needs_loading(publication(4, "a", epoch=2), publication(5, "b", epoch=2))
    assert needs_loading(publication(4, "a", epoch=2), publication(5, "b", epoch=3))
