"""The error that callers see of a failed task group."""

import pytest

from rollbook.concurrency.tasks import first_error

FIRST, SECOND, THIRD = ValueError("first"), OSError("second"), KeyError("third")
NESTED = BaseExceptionGroup("outer", [BaseExceptionGroup("inner", [FIRST, SECOND]), THIRD])


def test_a_plain_error_is_returned_as_it_is() -> None:
    assert first_error(FIRST) is FIRST


@pytest.mark.parametrize(
    ("prefer", "found"), [(None, FIRST), (OSError, SECOND), (KeyError, THIRD), (RuntimeError, FIRST)]
)
def test_the_first_preferred_error_is_found_in_nested_groups(
    prefer: type[BaseException] | None, found: BaseException
) -> None:
    assert first_error(NESTED, prefer=prefer) is found
