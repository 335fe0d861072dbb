"""Who acts on which failure: the one table. `docs/failures.md` is written from it.

A failure is judged by its class, the first row that fits decides. Limits of an episode are not in the table: reaching one is
something the policy did, so it is an outcome with a reward (see `OUTCOMES`).
"""

from dataclasses import dataclass
from enum import StrEnum

from rollbook.contracts.errors import EpisodeError, RunError, TransientError, WorkerError
from rollbook.contracts.trajectory import EndReason
from rollbook.rollout.episodes.policy import EpisodeTimeUpError
from rollbook.rollout.groups.filters import FilterError


class Action(StrEnum):
    DROP_SAMPLE = "dropped sample"
    """It stays in its group as unscorable, or is missing from it; it is not played again."""
    RETRY_SAMPLE = "retried sample"
    """It is played again while the group's budget (`rollout.retry_budget`) and its lease last; then as above."""
    FAIL_GROUP = "failed group"
    """The group is stored as dropped(invalid) with the cause, and the circuit breaker counts it."""
    REPLACE_WORKER = "replaced worker"
    """The process is replaced; its groups get another attempt from the ledger."""
    STOP_RUN = "stopped run"
    """A person must act: the run stops with exit code 1 and says why."""


class RolloutHangsError(EpisodeError):
    """A rollout function did not end by itself when the time of its episode was over."""


class BadSampleError(EpisodeError):
    """A rollout function returned something that is no sample, or a sample that it calls invalid itself."""


class UnscorableError(EpisodeError):
    """The reward functions could not score a finished episode."""


class SampleRaisedError(EpisodeError):
    """Foreign code raised something of its own."""


@dataclass(frozen=True, slots=True)
class Failure:
    """One row: the first whose class fits decides."""

    error: type[BaseException]
    action: Action
    why: str


FAILURES: tuple[Failure, ...] = (
    Failure(
        RunError, Action.STOP_RUN, "bad config, an expired licence, a fenced process: no other sample would fare better"
    ),
    Failure(WorkerError, Action.REPLACE_WORKER, "a leak, a lost heartbeat, a poisoned interpreter"),
    Failure(
        MemoryError,
        Action.REPLACE_WORKER,
        "what is left of the process cannot be trusted, and its siblings need memory",
    ),
    Failure(FilterError, Action.FAIL_GROUP, "a broken filter must not decide, neither to keep nor to drop in silence"),
    Failure(
        UnscorableError,
        Action.DROP_SAMPLE,
        "None, NaN, a fault or a timeout of a reward function; another episode in its place would choose the samples that "
        "are easy to score",
    ),
    Failure(
        EpisodeTimeUpError,
        Action.DROP_SAMPLE,
        "the function let its time run out and kept nothing; another try would choose the episodes that are fast",
    ),
    Failure(RolloutHangsError, Action.RETRY_SAMPLE, "it hung in something that is not the policy"),
    Failure(TransientError, Action.RETRY_SAMPLE, "a connection was lost or a request not answered in time"),
    Failure(EpisodeError, Action.RETRY_SAMPLE, "the world broke, a sandbox died, a parse failed"),
    Failure(
        Exception, Action.RETRY_SAMPLE, "whatever else escapes foreign code is an infrastructure failure, never a 0"
    ),
)

OUTCOMES: dict[EndReason, str] = {
    EndReason.DONE: "the world said so",
    EndReason.MAX_TURNS: "`rollout.max_turns` turns were played",
    EndReason.MAX_TOKENS: "`rollout.max_total_tokens` tokens were used",
    EndReason.TIME: "`rollout.max_seconds` seconds of its own were used; waiting for an engine's queue or for a sandbox is not "
    "among them",
}


def failure_of(error: BaseException) -> Failure:
    """The row that decides. Cancellation is no failure and is never asked about."""
    return next(row for row in FAILURES if isinstance(error, row.error))


def action_on(error: BaseException) -> Action:
    return failure_of(error).action
