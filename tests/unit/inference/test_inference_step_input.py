"""How decode attention divides rows between programs."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollbook.inference.engines.embedded.paged.step_input import StepShape, chunk_length


def num_items(lengths: list[int], chunk: int) -> int:
    return sum(-(-length // chunk) for length in lengths)


@pytest.mark.parametrize(("rows", "length"), [(256, 251), (512, 1101), (96, 4000)])
def test_many_rows_of_similar_lengths_are_not_split(rows: int, length: int) -> None:
    lengths = np.full(rows, length, dtype=np.int32)
    lengths[0] += 200
    assert chunk_length(lengths, rows=rows, key_heads=3) >= length + 200


def test_a_long_row_among_many_short_ones_is_split() -> None:
    lengths = np.full(512, 190, dtype=np.int32)
    lengths[7] = 2000
    assert chunk_length(lengths, rows=512, key_heads=3) == 512


@pytest.mark.parametrize(("rows", "length"), [(1, 4000), (8, 4000), (64, 1101)])
def test_few_long_rows_are_split_into_parts_of_similar_lengths(rows: int, length: int) -> None:
    chunk = chunk_length(np.full(rows, length, dtype=np.int32), rows=rows, key_heads=3)
    assert chunk < length
    assert chunk <= 1.25 * length / -(-length // chunk)


@given(lengths=st.lists(st.integers(1, 5000), max_size=600), key_heads=st.integers(1, 8))
def test_the_parts_of_all_rows_fit_into_the_step(lengths: list[int], key_heads: int) -> None:
    rows = max(1, len(lengths))
    chunk = chunk_length(np.array(lengths, dtype=np.int32), rows=rows, key_heads=key_heads)
    is_split = max(lengths, default=0) > chunk
    shape = StepShape.decode(rows, key_heads=key_heads, is_split=is_split)
    assert num_items(lengths, chunk) <= (shape.items if is_split else rows)
