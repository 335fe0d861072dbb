"""`rollbook export`: which rollouts of a record become demonstrations, and that `rollbook sft` reads them."""

import json
from pathlib import Path
from typing import Any

import pytest

from rollbook.commands.record.export import Chosen, export
from rollbook.contracts.errors import RunError
from rollbook.rollout.chat.demonstrations import _messages
from tests.parts.dashboard.recorded_run import record_run


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


async def test_the_best_rollouts_are_written_once_and_are_chats_of_sft(tmp_path: Path) -> None:
    directory = await record_run(tmp_path / "run")
    out = tmp_path / "data" / "best.jsonl"
    found = export(directory.path, out)
    rows = lines_of(out)
    assert found.written == len(rows) > 2
    assert found.duplicates > 0, "both samples of a group have the same messages in this record"
    assert found.samples == found.written + found.duplicates + found.left_out
    assert len({json.dumps(row["messages"]) for row in rows}) == len(rows)
    for line in out.read_text(encoding="utf-8").splitlines():
        assert _messages(line)[-1]["role"] == "assistant"
    some = export(directory.path, out, chosen=Chosen(tasks="task[01]", per_task=1))
    assert (some.written, {row["task"] for row in lines_of(out)}) == (2, {"task0", "task1"})
    best = export(directory.path, out, chosen=Chosen(min_reward=1.0))
    assert {row["reward"] for row in lines_of(out)} == {1.0}
    assert best.left_out > 0
    before = out.read_text(encoding="utf-8")
    with pytest.raises(RunError, match=r"no rollout to write: .* left out by the filters"):
        export(directory.path, out, chosen=Chosen(min_reward=100.0))
    assert out.read_text(encoding="utf-8") == before, "the file is not replaced by an empty one"
