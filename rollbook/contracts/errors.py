"""The exception tree: the class of an exception says who must act.

    RollbookError
    |-- TransientError   try this call again            (connection lost, 503, request deadline)
    |    `-- WeightsAwaitedError  not before the trainer has pushed weights
    |-- EpisodeError     give up this episode          (environment broke, parse failed, sandbox died)
    |-- WorkerError      replace this process           (leak, lost heartbeat, broken interpreter state)
    `-- RunError         stop the run, operator needed  (bad config, corrupt checkpoint, schema mismatch)
         |-- UsageError  the command, its config or its directory is wrong; nothing was started
         `-- FencedError this process was replaced by a newer one: stop without side effects

Each room derives its exceptions from these. A retry loop catches `TransientError`, a supervisor `WorkerError`. All classes can be
pickled, because exceptions cross process boundaries.
"""

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from rollbook.contracts.user_errors import describe_error

# Failures of the machine that an operator must fix: what is wrong, and what to do.
MACHINE_FAULTS = {
    errno.ENOSPC: "the disk is full: free some space",
    errno.EDQUOT: "the disk quota is used up: free some space",
    errno.EFBIG: "a file has reached the largest size that is allowed: raise the limit (ulimit -f)",
    errno.EROFS: "the file system is read-only: make it writable",
    errno.EIO: "the disk reports an error: check it",
    errno.ESTALE: "the file system is no longer mounted: mount it",
    errno.EMFILE: "the limit of open files of a process is reached: raise it (ulimit -n)",
    errno.ENFILE: "the limit of open files of this machine is reached: close some, or raise it (fs.file-max)",
    errno.ENOMEM: "there is no free memory: free some",
    errno.EAGAIN: "no more processes can be started: raise the limit (ulimit -u, or pids.max of the cgroup), or end some",
}
ALLOCATION_FAILURES = (
    "out of memory",
    "can't allocate memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)
"""How libraries report that a GPU or main memory is full, if not by an exception class of its own."""


class RollbookError(Exception):
    """Base class of all exceptions that this project raises."""


class TransientError(RollbookError):
    """Try this call again. `retry_after_s` is the delay that the peer requested, if any."""

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s

    def __reduce__(self) -> tuple[object, ...]:
        return (_unpickle_transient, (type(self), self.args[0] if self.args else "", self.retry_after_s))


class WeightsAwaitedError(TransientError):
    """No policy server has the weights that the request requires. Only the trainer can change that."""


class EpisodeError(RollbookError):
    """Give up this episode and continue. The message becomes the `invalid_cause` of its sample."""


class WorkerError(RollbookError):
    """Replace this process."""


class RunError(RollbookError):
    """Stop the run; the operator must act."""


class UsageError(RunError):
    """The command, its configuration or its directory is wrong. Nothing was started."""


class NotFoundError(RunError):
    """The requested object does not exist."""


class FencedError(RunError):
    """A newer process holds this role. Stop without more side effects."""


def machine_fault(error: BaseException | None) -> str | None:
    """What is wrong with the machine and what to do, if that is the cause of an error. A restart of the process would not help."""
    is_context = False
    while error is not None:
        # A socket that is not ready also reports EAGAIN, and that error is often handled: as a context it proves nothing.
        if (
            isinstance(error, OSError)
            and error.errno in MACHINE_FAULTS
            and not (is_context and error.errno == errno.EAGAIN)
        ):
            return f"{MACHINE_FAULTS[error.errno]} ({error})"
        if isinstance(error, RuntimeError) and "can't start new thread" in str(error):
            return f"{MACHINE_FAULTS[errno.EAGAIN]} ({error})"
        # The clean-up after a fault often fails too: then the fault is the context of the second error.
        is_context = is_context or error.__cause__ is None
        error = error.__cause__ or error.__context__
    return None


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an operation failed because a GPU or main memory is full. A `RunError` counts if it reports such a cause, like an
    update that a policy server refused. torch's exception is known by its name: this room has no torch."""
    if any(kind.__name__ in {"OutOfMemoryError", "MemoryError"} for kind in type(error).__mro__):
        return True
    return isinstance(error, RuntimeError | RunError) and any(sign in str(error) for sign in ALLOCATION_FAILURES)


def _unpickle_transient(kind: type[TransientError], message: str, retry_after_s: float | None) -> TransientError:
    return kind(message, retry_after_s=retry_after_s)


@contextmanager
def fenced(stage: str) -> Iterator[None]:
    """Run user code: any exception becomes an `EpisodeError` that names the stage, the original exception and the lines of
    user code that raised it.

    `RollbookError`s and cancellation pass unchanged.
    """
    try:
        yield
    except RollbookError:
        raise
    except Exception as error:
        raise EpisodeError(f"{stage} raised {describe_error(error)}") from error
