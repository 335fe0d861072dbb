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


def said(content: str | None, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"left": 2}'}}
ASKED = {"role": "user", "content": "2 and 2?"}


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ((ASKED, said("")), None),
        ((ASKED, said(None)), None),
        ((ASKED, said(" \n")), None),
        ((ASKED,), None),
        ((), None),
        (({"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}, said("4")), None),
        (({"role": "narrator", "content": "x"}, said("4")), None),
        (
            ({"role": "user", "content": [{"type": "text", "text": "2 and "}, {"text": "2?"}]}, said("4")),
            [ASKED, said("4")],
        ),
        (
            (ASKED, said(None, tool_calls=[CALL], reasoning_content="Add them.")),
            [
                ASKED,
                said(
                    "",
                    tool_calls=[{**CALL, "function": {"name": "add", "arguments": {"left": 2}}}],
                    reasoning_content="Add them.",
                ),
            ],
        ),
        # The record has one turn, so the first two answers are examples of the prompt.
        (
            (ASKED, said("3"), ASKED, said(""), ASKED, said("4")),
            [ASKED, said("3", weight=0), ASKED, said("", weight=0), ASKED, said("4")],
        ),
    ],
)
async def test_a_chat_has_text_and_objects_and_trains_what_the_policy_said(
    tmp_path: Path, messages: tuple[dict[str, Any], ...], expected: list[dict[str, Any]] | None
) -> None:
    directory = await record_run(tmp_path / "run", change=lambda sample: replace(sample, messages=messages))
    found = export(directory.path, tmp_path / "chats.jsonl")
    rows = [row["messages"] for row in lines_of(tmp_path / "chats.jsonl") if row["task"] == "task0"]
    assert rows == ([] if expected is None else [expected])
    assert found.samples == found.written + found.duplicates + found.left_out
    build = ModelBuildConfig(tokenizer="bytes", chat_template=TOOL_TEMPLATE)
    build_tokenizer(build).save_pretrained(str(tmp_path / "model"))
    tokenizer = ModelTokenizer.from_directory(tmp_path / "model")
    read = read_demonstrations(tmp_path / "chats.jsonl", tokenizer, max_tokens=999, is_strict=True)
    assert len(read.rows) == found.written
    if rows:
        trained = read.rows[0].token_ids[read.rows[0].loss_mask].tolist()
        (*_, last) = rows[0]
        calls = "".join(json.dumps(call["function"]["arguments"]) for call in last.get("tool_calls", ()))
        assert tokenizer.decode(trained) == last["content"] + calls


TOOL_TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}"
    "{% endfor %}<eos>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


async def test_turns_of_subagents_are_no_answers_of_the_conversation_and_cut_turns_are_no_demonstration(
    tmp_path: Path,
) -> None:
    lineage = [
        {"sequence": 0, "role": "main", "parent": None},
        {"sequence": 1, "role": "subagent", "parent": 0, "left_out": 'subagent with train_only = "main"'},
        {"sequence": 2, "role": "rewrite", "parent": 0},
    ]

    def forked(sample: RolloutSample) -> RolloutSample:
        (row,), (turn,) = sample.sequences, sample.turns
        untrained = replace(row, loss_mask=row.loss_mask & False)
        marks = tuple(replace(turn, sequence=sequence) for sequence in (0, 1, 1, 2))
        messages = (ASKED, said("example"), ASKED, said("first"), ASKED, said("last"))
        return replace(
            sample, sequences=(row, untrained, row), turns=marks, messages=messages, facts={"lineage": lineage}
        )

    directory = await record_run(tmp_path / "forked", change=forked)
    export(directory.path, tmp_path / "chats.jsonl", chosen=Chosen(tasks="task0"))
    (line,) = lines_of(tmp_path / "chats.jsonl")
    assert [message.get("weight") for message in line["messages"] if message["role"] == "assistant"] == [0, None, None]

    def cut(sample: RolloutSample) -> RolloutSample:
        return replace(sample, metrics={"cut_turns": 1.0})

    directory = await record_run(tmp_path / "cut", change=cut)
    assert {row["task"] for row in lines_of_export(directory.path, tmp_path / "cut.jsonl")} == {
        "task1",
        "task2",
        "task3",
        "task4",
        "task5",
    }


def lines_of_export(run: Path, out: Path, **chosen: Any) -> list[dict[str, Any]]:
    export(run, out, chosen=Chosen(**chosen))
    return lines_of(out)
