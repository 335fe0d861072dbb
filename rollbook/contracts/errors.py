"""The four verdicts: an exception's class says who must act.

    RollbookError
    |-- TransientError   try this call again            (connection lost, 503, request deadline)
    |-- EpisodeError     give up this episode, go on    (environment broke, parse failed, sandbox died)
    |-- WorkerError      replace this process           (leak, lost heartbeat, poisoned interpreter)
    `-- RunError         stop and fetch a person        (bad config, corrupt checkpoint, schema mismatch)
         `-- FencedError this process was replaced by a newer one: stop quietly, touch nothing

Each room derives its own from these. A retry loop catches `TransientError`, a supervisor `WorkerError`; nobody has to know the
room to choose well. Every class can be pickled: errors cross process edges.
"""

from collections.abc import Iterator
from contextlib import contextmanager


class RollbookError(Exception):
    """Root of everything this project raises on purpose."""


class TransientError(RollbookError):
    """Try this call again. `retry_after_s` is the peer's own advice, when it gave one."""

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s

    def __reduce__(self) -> tuple[object, ...]:
        return (_revive_transient, (type(self), self.args[0] if self.args else "", self.retry_after_s))


class EpisodeError(RollbookError):
    """Give up this episode and go on. The cause becomes the `invalid_cause` of its sample."""


class WorkerError(RollbookError):
    """Replace this process."""


class RunError(RollbookError):
    """Stop the run and fetch a person."""


class FencedError(RunError):
    """A newer process holds this role. Whoever gets this must stop without touching anything."""


def _revive_transient(kind: type[TransientError], message: str, retry_after_s: float | None) -> TransientError:
    return kind(message, retry_after_s=retry_after_s)


@contextmanager
def fenced(stage: str, verdict: type[EpisodeError] | type[WorkerError] = EpisodeError) -> Iterator[None]:
    """Run foreign code: whatever escapes becomes `verdict`, naming the stage and the original error.

    Our own errors pass unchanged (they already carry a verdict), and so does cancellation.
    """
    try:
        yield
    except RollbookError:
        raise
    except Exception as error:
        raise verdict(f"{stage} raised {type(error).__name__}: {error}") from error
