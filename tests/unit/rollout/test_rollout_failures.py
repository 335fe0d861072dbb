"""The failure table."""

import pytest

from rollbook.contracts.errors import EpisodeError, FencedError, RollbookError, RunError, TransientError, WorkerError
from rollbook.contracts.trajectory import EndReason
from rollbook.rollout.groups.failures import (
    FAILURES,
    OUTCOMES,
    Action,
    BadSampleError,
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
        (RunError("x"), Action.STOP_RUN),
        (FencedError("x"), Action.STOP_RUN),
        (WorkerError("x"), Action.REPLACE_WORKER),
        (WorkerDiedError("x"), Action.REPLACE_WORKER),
        (MemoryError(), Action.REPLACE_WORKER),
        (FilterError("x"), Action.FAIL_GROUP),
        (UnscorableError("x"), Action.DROP_SAMPLE),
        (EpisodeTimeUpError("x"), Action.DROP_SAMPLE),
        (RolloutHangsError("x"), Action.RETRY_SAMPLE),
        (BadSampleError("x"), Action.RETRY_SAMPLE),
        (TransientError("x"), Action.RETRY_SAMPLE),
        (EpisodeError("x"), Action.RETRY_SAMPLE),
        (TimeoutError(), Action.RETRY_SAMPLE),
        (ValueError(), Action.RETRY_SAMPLE),
    ],
)
def test_every_error_class_has_one_action(error: Exception, action: Action) -> None:
    assert action_on(error) is action


def test_the_table_covers_every_error_and_no_row_is_hidden_by_an_earlier_one() -> None:
    for number, row in enumerate(FAILURES):
        assert not any(issubclass(row.error, earlier.error) for earlier in FAILURES[:number]), row
    assert issubclass(RollbookError, FAILURES[-1].error)
    assert set(OUTCOMES) == set(EndReason)
    assert {row.action for row in FAILURES} == set(Action)


def test_causes_are_listed_most_frequent_first_and_limited() -> None:
    assert describe_causes({"a": 1, "b": 5, "c": 2, "d": 1}) == "5 x b; 2 x c; 1 x a; and 1 further causes"
