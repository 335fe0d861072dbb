"""How the conversations of an episode are recognised, by headers or by their texts."""

import json
from typing import Any

from rollbook.contracts.output_formats import ToolCall
from rollbook.rollout.agents.lineage import Lineage, RequestOrigin, SequenceRole, TrainOnly, read_origin
from rollbook.rollout.agents.tool_calls import ParsedText


def add(
    lineage: Lineage, sequence: int, *users: str, reply: str | ParsedText = "ok", tools: bool = True, **more: Any
) -> None:
    messages = [{"role": "user", "content": text} for text in users]
    parsed = ParsedText(reply) if isinstance(reply, str) else reply
    settings = {"origin": RequestOrigin(), "rendered": "|".join((*users, str(tools))), "is_continued": False, **more}
    lineage.add(sequence, messages, parsed, has_tools=tools, **settings)


def roles(lineage: Lineage) -> list[tuple[str, int | None]]:
    return [(origin.role.value, origin.parent) for origin in lineage.origins()]


def test_the_first_conversation_with_tools_is_the_main_one_and_requests_without_tools_are_side_requests() -> None:
    lineage = Lineage()
    add(lineage, 0, "Is this a new topic?", tools=False)
    add(lineage, 1, "Fix the bug")
    add(lineage, 2, "Write a title", tools=False)
    assert roles(lineage) == [("side", 1), ("main", None), ("side", 1)]


def test_without_any_tools_the_first_conversation_is_the_main_one() -> None:
    lineage = Lineage()
    add(lineage, 0, "Plan it", tools=False)
    add(lineage, 1, "Solve it", tools=False)
    assert roles(lineage) == [("main", None), ("subagent", 0)]


def test_a_conversation_whose_task_the_policy_passed_to_a_tool_is_its_sub_agent() -> None:
    lineage = Lineage()
    task = ToolCall("Task", json.dumps({"prompts": ["Look for all callers of parse"]}))
    add(lineage, 0, "Fix the bug", reply=ParsedText("", (task,)))
    add(lineage, 1, "<env/>", "Look for all callers of parse")
    add(lineage, 1, "<env/>", "Look for all callers of parse", "go on")
    assert roles(lineage) == [("main", None), ("subagent", 0)]


def test_a_conversation_that_starts_with_a_summary_of_the_policy_continues_after_a_compaction() -> None:
    lineage = Lineage()
    add(lineage, 0, "Fix the bug")
    add(lineage, 1, "Summarise: Fix the bug", reply="The bug is in parse, line 3.", tools=False)
    add(lineage, 2, "So far:\nThe bug is in parse, line 3.\nContinue.")
    assert roles(lineage) == [("main", None), ("compaction", 0), ("compaction", 1)]
    assert {origin.owner for origin in lineage.origins()} == {SequenceRole.MAIN}


def test_the_same_prompt_again_is_a_retry_and_an_edited_history_is_a_rewrite() -> None:
    lineage = Lineage()
    add(lineage, 0, "Fix the bug")
    add(lineage, 1, "Fix the bug")
    add(lineage, 2, "Fix the bug", "edited")
    assert roles(lineage) == [("main", None), ("retry", 0), ("rewrite", 1)]


def test_headers_of_codex_name_threads_their_parents_and_compactions() -> None:
    def headers(thread: str, parent: str | None = None, **about: Any) -> dict[str, str]:
        more = {} if parent is None else {"x-codex-parent-thread-id": parent}
        return {"thread-id": thread, "x-codex-turn-metadata": json.dumps(about), **more}

    lineage = Lineage()
    for sequence, sent in enumerate(
        [
            headers("a", request_kind="turn", window_number=0),
            headers("b", "a", request_kind="turn", window_number=0),
            headers("a", request_kind="compaction", window_number=0),
            headers("a", request_kind="turn", window_number=1),
            headers("b", "a", request_kind="turn", window_number=0),
        ]
    ):
        add(lineage, sequence, "<environment/>", f"text {sequence}", origin=read_origin(sent))
    assert roles(lineage) == [("main", None), ("subagent", 0), ("compaction", 0), ("compaction", 2), ("rewrite", 1)]
    left_out = [origin.left_out for origin in lineage.origins(TrainOnly.MAIN)]
    assert [reason is not None for reason in left_out] == [False, True, False, False, True]
    assert read_origin({"x-codex-turn-metadata": "{"}) == RequestOrigin()
