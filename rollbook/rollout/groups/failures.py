"""Decides by its class what a failure means. `docs/failures.md` is generated from this table.

The limits of an episode are not failures: the policy reached them, so the episode has an outcome and a reward (`OUTCOMES`).
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from rollbook.contracts.errors import EpisodeError, RunError, TransientError, WorkerError
from rollbook.contracts.trajectory import EndReason
from rollbook.contracts.user_errors import indented
from rollbook.rollout.groups.filters import FilterError
from rollbook.rollout.policy import EpisodeTimeUpError


class FailureAction(StrEnum):
    DROP_SAMPLE = "dropped sample"
    """The sample stays in its group as unscorable, or is missing; it is not played again."""
    RETRY_SAMPLE = "retried sample"
    """The sample is played again within `rollout.retry_budget` and the lease; then it is dropped."""
    FAIL_GROUP = "failed group"
    """The group is stored as dropped(invalid) with the cause, and the circuit breaker counts it."""
    REPLACE_WORKER = "replaced worker"
    """The process is replaced; its groups get another attempt from the ledger."""
    STOP_RUN = "stopped run"
    """The run stops with exit code 1 and an error for the operator."""


class RolloutHangsError(EpisodeError):
    """A rollout function did not return when the time of its episode was over."""


class BadSampleError(EpisodeError):
    """A rollout function returned something that is not a sample, or an invalid sample."""


class UnscorableError(EpisodeError):
    """The reward functions could not score a finished episode."""


class SampleRaisedError(EpisodeError):
    """A rollout function raised an exception that is not a `RollbookError`."""


@dataclass(frozen=True, slots=True)
class Failure:
    error: type[BaseException]
    action: FailureAction
    why: str


FAILURES: tuple[Failure, ...] = (
    Failure(
        RunError,
        FailureAction.STOP_RUN,
        "bad config, expired licence, fenced process: every other sample would fail too",
    ),
    Failure(WorkerError, FailureAction.REPLACE_WORKER, "memory leak, lost heartbeat, broken interpreter state"),
    Failure(
        MemoryError,
        FailureAction.REPLACE_WORKER,
        "the state of the process is unreliable, and other episodes need memory",
    ),
    Failure(FilterError, FailureAction.FAIL_GROUP, "a broken filter must neither keep nor silently drop a group"),
    Failure(
        UnscorableError,
        FailureAction.DROP_SAMPLE,
        "a reward function returned None or NaN, raised or timed out; replacing the episode would select samples that are "
        "easy to score",
    ),
    Failure(
        EpisodeTimeUpError,
        FailureAction.DROP_SAMPLE,
        "the function used all its time and returned nothing; a retry would select fast episodes",
    ),
    Failure(RolloutHangsError, FailureAction.RETRY_SAMPLE, "the function hung outside the policy"),
    Failure(TransientError, FailureAction.RETRY_SAMPLE, "connection lost, or no response in time"),
    Failure(EpisodeError, FailureAction.RETRY_SAMPLE, "environment failed, sandbox died, parse error"),
    Failure(
        Exception,
        FailureAction.RETRY_SAMPLE,
        "any other exception in user code is an infrastructure failure, never reward 0",
    ),
)
"""The first row whose class matches decides."""

OUTCOMES: dict[EndReason, str] = {
    EndReason.DONE: "the environment ended the episode",
    EndReason.MAX_TURNS: "`rollout.max_turns` turns were played",
    EndReason.MAX_TOKENS: "`rollout.sampling.max_tokens` cut the last answer, or `rollout.max_total_tokens` tokens were used",
    EndReason.TIME: "`rollout.max_seconds` seconds were used, without time in the engine's queue or waiting for a sandbox",
}

SHOWN_CAUSES = 3


def action_on(error: BaseException) -> FailureAction:
    """Not for cancellation, which is not a failure."""
    return next(row for row in FAILURES if isinstance(error, row.error)).action


def describe_causes(causes: Mapping[str, int]) -> str:
    """`5 x rollout raised ValueError: no; 1 x env: connection lost`: the most frequent first, without tracebacks."""
    merged: Counter[str] = Counter()
    for cause, count in causes.items():
        merged[cause.partition("\n")[0]] += count
    shown = "; ".join(f"{count} x {cause}" for cause, count in merged.most_common(SHOWN_CAUSES))
    return shown if len(merged) <= SHOWN_CAUSES else f"{shown}; and {len(merged) - SHOWN_CAUSES} further causes"


def list_causes(causes: Mapping[str, int], *, most: int) -> str:
    """One cause after the other with its traceback, the most frequent first."""
    ranked = Counter(causes).most_common()
    lines = [indented(f"{count} x {cause}", "  ") for cause, count in ranked[:most]]
    return "\n".join(lines if len(ranked) <= most else [*lines, f"  and {len(ranked) - most} further causes"])
