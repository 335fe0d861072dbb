"""A rollout function gets its own copy of the row of its task."""

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rollbook.contracts.task import Task, TaskId

plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda values: st.lists(values, max_size=4) | st.dictionaries(st.text(max_size=3), values, max_size=4),
    max_leaves=20,
)


def containers(value: Any) -> list[int]:
    """The identities of all lists and dicts in a value."""
    if isinstance(value, dict):
        return [id(value), *(found for item in value.values() for found in containers(item))]
    if isinstance(value, list):
        return [id(value), *(found for item in value for found in containers(item))]
    return []


@given(st.dictionaries(st.text(max_size=3), plain, max_size=4))
def test_a_copied_row_is_equal_and_shares_no_list_or_dict(row: dict[str, Any]) -> None:
    copied = Task(id=TaskId("t"), row=row).row_copy()
    assert copied == row
    assert not set(containers(copied)) & set(containers(row))


def test_a_copied_row_shares_no_value_of_another_type() -> None:
    row = {"array": np.arange(3), "nested": [{"pair": ([1], [2])}]}
    copied = Task(id=TaskId("t"), row=row).row_copy()
    copied["array"][0] = 7
    copied["nested"][0]["pair"][0].append(3)
    assert row["array"][0] == 0  # type: ignore[index]  # a dict of different types
    assert row["nested"] == [{"pair": ([1], [2])}]
