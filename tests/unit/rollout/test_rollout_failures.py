"""The failure table."""

import pytest

from rollbook.contracts.errors import EpisodeError, FencedError, RollbookError, RunError, TransientError, WorkerError
from rollbook.contracts.trajectory import EndReason
from rollbook.rollout.groups.failures import (
    FAILURES,
    OUTCOMES,
    BadSampleError,
    FailureAction,
    RolloutHangsError,
    UnscorableError,
    action_on,
    describe_causes,
)
from rollbook.rollout.groups.filters import FilterError
from rollbook.rollout.policy import (
    EpisodeTimeUpError,
)
from rollbook.rollout.workers.handle import WorkerDiedError


@pytest.mark.parametrize(
    ("error", "action"),
    [
        (RunError("x"), FailureAction.STOP_RUN),
        (FencedError("x"), FailureAction.STOP_RUN),
        (WorkerError("x"), FailureAction.REPLACE_WORKER),
        (WorkerDiedError("x"), FailureAction.REPLACE_WORKER),
        (MemoryError(), FailureAction.REPLACE_WORKER),
        (FilterError("x"), FailureAction.FAIL_GROUP),
        (UnscorableError("x"), FailureAction.DROP_SAMPLE),
        (EpisodeTimeUpError("x"), FailureAction.DROP_SAMPLE),
        (RolloutHangsError("x"), FailureAction.RETRY_SAMPLE),
        (BadSampleError("x"), FailureAction.RETRY_SAMPLE),
        (TransientError("x"), FailureAction.RETRY_SAMPLE),
        (EpisodeError("x"), FailureAction.RETRY_SAMPLE),
        (TimeoutError(), FailureAction.RETRY_SAMPLE),
        (ValueError(), FailureAction.RETRY_SAMPLE),
    ],
)
def test_every_error_class_has_one_action(error: Exception, action: FailureAction) -> None:
    assert action_on(error) is action


def test_the_table_covers_every_error_and_no_row_is_hidden_by_an_earlier_one() -> None:
    for number, row in enumerate(FAILURES):
        assert not any(issubclass(row.error, earlier.error) for earlier in FAILURES[:number]), row
    assert issubclass(RollbookError, FAILURES[-1].error)
    assert set(OUTCOMES) == set(EndReason)
    assert {row.action for row in FAILURES} == set(FailureAction)


def test_causes_are_listed_most_frequent_first_and_limited() -> None:
    assert describe_causes({"a": 1, "b": 5, "c": 2, "d": 1}) == "5 x b; 2 x c; 1 x a; and 1 further causes"
