"""Exceptions survive pickling; exceptions of user code are converted."""

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
def test_an_exception_survives_pickling(kind: type[RollbookError]) -> None:
    copy = pickle.loads(pickle.dumps(kind("group guess-7@0: connection lost")))
    assert type(copy) is kind
    assert str(copy) == "group guess-7@0: connection lost"


class ServerBusyError(TransientError):
    """A derived exception with the inherited signature."""


def test_retry_after_survives_pickling_in_a_derived_exception() -> None:
    copy = pickle.loads(pickle.dumps(ServerBusyError("429", retry_after_s=2.5)))
    assert type(copy) is ServerBusyError
    assert copy.retry_after_s == 2.5


def test_a_fenced_process_stops_its_run() -> None:
    assert issubclass(FencedError, RunError)


def test_an_exception_of_user_code_is_converted_and_names_the_stage() -> None:
    with (
        pytest.raises(EpisodeError, match=r"grading raised ZeroDivisionError: division by zero") as caught,
        fenced("grading"),
    ):
        _ = 1 / 0
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_the_class_of_the_converted_exception_can_be_chosen() -> None:
    with pytest.raises(WorkerError, match="loading"), fenced("loading", WorkerError):
        raise MemoryError


def test_rollbook_errors_pass_unchanged() -> None:
    original = TransientError("503")
    with pytest.raises(TransientError) as caught, fenced("policy"):
        raise original
    assert caught.value is original


def test_cancellation_passes_unchanged() -> None:
    with pytest.raises(asyncio.CancelledError), fenced("env step"):
        raise asyncio.CancelledError
