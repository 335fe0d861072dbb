"""Records of single tokens: written every k-th step, the newest are kept, damage is not an error."""

import math
from pathlib import Path

import numpy as np
import pytest

from rollbook.telemetry.token_records import TokenArrays, TokenRecordWriter, read_token_record, recorded_steps


def arrays(*values: float) -> TokenArrays:
    array = np.array(values)
    return TokenArrays.of(array, array + 1, array + 2)


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    writer = TokenRecordWriter(tmp_path, every=2, kept=3)
    assert [step for step in range(1, 7) if writer.is_due(step)] == [2, 4, 6]
    writer.write(2, {("task@0", 0, 0): arrays(math.nan, -0.5), ("task@0", 1, 0): arrays(1.0)})
    record = read_token_record(tmp_path, 2, "task@0", 0, 0)
    assert record is not None
    assert math.isnan(record.logprob[0])
    assert (record.step, record.logprob[1], record.entropy[1], record.advantage[1]) == (2, -0.5, 0.5, 1.5)
    assert read_token_record(tmp_path, 2, "task@0", 2, 0) is None
    assert read_token_record(tmp_path, 3, "task@0", 0, 0) is None


def test_the_newest_records_are_kept(tmp_path: Path) -> None:
    writer = TokenRecordWriter(tmp_path, every=1, kept=2)
    for step in (8, 9, 10, 11):
        writer.write(step, {("g", 0, 0): arrays(0.0)})
    assert recorded_steps(tmp_path) == [10, 11]


def test_without_an_interval_nothing_is_due(tmp_path: Path) -> None:
    assert not TokenRecordWriter(tmp_path, every=0, kept=1).is_due(1)


def test_a_damaged_record_is_absent(tmp_path: Path) -> None:
    TokenRecordWriter(tmp_path, every=1, kept=2).write(1, {("g", 0, 0): arrays(0.0)})
    file = tmp_path / "tokens" / "step-1.msgpack"
    file.write_bytes(file.read_bytes()[:-3])
    assert read_token_record(tmp_path, 1, "g", 0, 0) is None


def test_a_folder_that_cannot_be_written_does_not_stop_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "tokens").write_text("a file", encoding="utf-8")
    TokenRecordWriter(tmp_path, every=1, kept=2).write(1, {("g", 0, 0): arrays(0.0)})
    assert "token records are not written" in caplog.text
