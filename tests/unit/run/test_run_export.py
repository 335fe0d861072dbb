"""`rollbook export`: which rollouts of a record become demonstrations, and that `rollbook sft` reads them."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rollbook.commands.record.export import Chosen, export
from rollbook.contracts.errors import RunError
from rollbook.contracts.trajectory import CHAT_FACT, RolloutSample, TokenRow
from rollbook.rollout.chat.demonstrations import read_demonstrations
from rollbook.rollout.chat.tokenizer import ModelTokenizer
from rollbook.trainer.model.model_directory import build_tokenizer
from rollbook.trainer.model_config import ModelBuildConfig
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
    assert all(row["messages"][-1]["role"] == "assistant" and "tools" not in row for row in rows)
    some = export(directory.path, out, chosen=Chosen(tasks="task[01]", per_task=1))
    assert (some.written, {row["task"] for row in lines_of(out)}) == (2, {"task0", "task1"})
    best = export(directory.path, out, chosen=Chosen(min_reward=1.0))
    assert {row["reward"] for row in lines_of(out)} == {1.0}
    assert best.left_out > 0
    before = out.read_text(encoding="utf-8")
    with pytest.raises(RunError, match=r"no rollout to write: .* left out by the filters"):
        export(directory.path, out, chosen=Chosen(min_reward=100.0))
    assert out.read_text(encoding="utf-8") == before, "the file is not replaced by an empty one"


TOOLS = [{"type": "function", "function": {"name": "add"}}]


async def test_a_line_has_the_tools_and_template_arguments_of_its_prompt_and_text_of_a_thinking_budget_is_left_out(
    tmp_path: Path,
) -> None:
    def with_tools(sample: RolloutSample) -> RolloutSample:
        return replace(sample, facts={CHAT_FACT: {"tools": TOOLS, "template": {"enable_thinking": False}}})

    directory = await record_run(tmp_path / "tools", change=with_tools)
    export(directory.path, tmp_path / "tools.jsonl")
    told = [row for row in lines_of(tmp_path / "tools.jsonl") if row["task"] == "task0"]
    assert [(row["tools"], row["template"]) for row in told] == [(TOOLS, {"enable_thinking": False})]

    def with_written(sample: RolloutSample) -> RolloutSample:
        (row,) = sample.sequences
        (turn,) = sample.turns
        written = TokenRow.of(
            token_ids=[*row.token_ids, 7, 8],
            logprobs=[*row.logprobs, 0.0, -1.0],
            loss_mask=[*row.loss_mask, False, True],
            versions=[*row.versions, -1, row.versions[-1]],
        )
        return replace(sample, sequences=(written,), turns=(replace(turn, end=len(written)),))

    directory = await record_run(tmp_path / "written", change=with_written)
    build_tokenizer(ModelBuildConfig(tokenizer="bytes")).save_pretrained(str(directory.path / "model"))
    directory.record_model(directory.path / "model")
    tokenizer = ModelTokenizer.from_directory(directory.path / "model")
    export(directory.path, tmp_path / "chats.jsonl")
    assert "task0" not in {row["task"] for row in lines_of(tmp_path / "chats.jsonl")}
    found = export(directory.path, tmp_path / "tokens.jsonl", chosen=Chosen(as_tokens=True, tasks="task0"))
    rows = lines_of(tmp_path / "tokens.jsonl")
    assert found.written == len(rows)
    assert {row["vocabulary"] for row in rows} == {tokenizer.vocabulary_digest}
    assert all((row["token_ids"][-2:], row["loss_mask"][-2:]) == ([7, 8], [0, 1]) for row in rows)
    read = read_demonstrations(tmp_path / "tokens.jsonl", tokenizer, max_tokens=99, is_strict=True)
    assert [row.token_ids.tolist() for row in read.rows] == [row["token_ids"] for row in rows]
    assert [row.loss_mask.astype(int).tolist() for row in read.rows] == [row["loss_mask"] for row in rows]
