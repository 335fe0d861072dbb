"""Exceptions survive pickling; exceptions of user code are converted."""

import asyncio
import errno
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
    machine_fault,
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


def test_rollbook_errors_pass_unchanged() -> None:
    original = TransientError("503")
    with pytest.raises(TransientError) as caught, fenced("policy"):
        raise original
    assert caught.value is original


def test_cancellation_passes_unchanged() -> None:
    with pytest.raises(asyncio.CancelledError), fenced("env step"):
        raise asyncio.CancelledError


def raised(outer: Exception, inner: Exception, *, is_cause: bool) -> Exception:
    """`outer`, raised while `inner` was handled, or because of it."""
    try:
        try:
            raise inner
        except Exception:
            if is_cause:
                raise outer from inner
            raise outer  # noqa: B904 - the context is what is tested
    except Exception as error:
        return error


@pytest.mark.parametrize("is_cause", [True, False])
def test_a_fault_of_the_machine_is_found_behind_the_error_of_a_clean_up(is_cause: bool) -> None:
    error = raised(
        RuntimeError("Cannot close a running event loop"), OSError(24, "Too many open files"), is_cause=is_cause
    )
    fault = machine_fault(raised(KeyError("x"), error, is_cause=False))
    assert fault is not None
    assert "ulimit -n" in fault


def test_a_socket_that_was_not_ready_is_no_fault_of_the_machine() -> None:
    not_ready = BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
    assert machine_fault(raised(ValueError("bad"), not_ready, is_cause=False)) is None
    assert "ulimit -u" in str(machine_fault(not_ready))
    assert "ulimit -u" in str(machine_fault(raised(ValueError("bad"), not_ready, is_cause=True)))
