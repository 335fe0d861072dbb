"""Errors carry a verdict over process edges; foreign code is fenced."""

import asyncio
import pickle

import pytest

from rollbook.contracts.errors import (
    EpisodeError,
    FencedError,
    RollbookError,
    RunError,
    TransientError,
    WorkerError,
    fenced,
)


@pytest.mark.parametrize("kind", [EpisodeError, WorkerError, RunError, FencedError, TransientError])
def test_an_error_survives_the_way_between_processes(kind: type[RollbookError]) -> None:
    revived = pickle.loads(pickle.dumps(kind("group guess-7@0: connection lost")))
    assert type(revived) is kind
    assert str(revived) == "group guess-7@0: connection lost"


class ServerBusyError(TransientError):
    """A room's own error, with the signature it inherited."""


def test_the_advice_to_wait_survives_too_also_in_a_rooms_own_error() -> None:
    revived = pickle.loads(pickle.dumps(ServerBusyError("429", retry_after_s=2.5)))
    assert type(revived) is ServerBusyError
    assert revived.retry_after_s == 2.5


def test_a_replaced_process_is_told_to_stop_the_run_it_thinks_it_has() -> None:
    assert issubclass(FencedError, RunError)


def test_what_foreign_code_raises_becomes_the_verdict_and_names_the_stage() -> None:
    with (
        pytest.raises(EpisodeError, match=r"grading raised ZeroDivisionError: division by zero") as caught,
        fenced("grading"),
    ):
        _ = 1 / 0
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_a_fence_can_give_another_verdict() -> None:
    with pytest.raises(WorkerError, match="loading"), fenced("loading", WorkerError):
        raise MemoryError


def test_our_own_errors_pass_a_fence_unchanged() -> None:
    original = TransientError("503")
    with pytest.raises(TransientError) as caught, fenced("policy"):
        raise original
    assert caught.value is original


def test_cancellation_passes_a_fence_unchanged() -> None:
    with pytest.raises(asyncio.CancelledError), fenced("env step"):
        raise asyncio.CancelledError
