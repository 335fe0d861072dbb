"""How the conversations of an episode are recognised, by headers or by their texts."""

import json
from typing import Any

import pytest

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


def test_a_summary_is_found_without_its_tags_and_a_request_with_tools_for_it_is_a_compaction() -> None:
    lineage = Lineage()
    add(lineage, 0, "Fix the bug")
    add(lineage, 0, "Fix the bug", "go on")
    reply = "<analysis>It is long.</analysis>\n<summary>The bug is in parse,\n\n\nline 3.</summary>"
    add(lineage, 1, "Fix the bug", "Summarise", reply=reply, is_continued=True)
    add(lineage, 2, "So far:\nThe bug is in parse,\n\nline 3.")
    assert roles(lineage) == [("main", None), ("compaction", 0), ("compaction", 1)]


def test_a_sub_agent_whose_task_quotes_an_answer_is_no_compaction() -> None:
    lineage = Lineage()
    first, second = "Look for all callers of parse", "Change these: main.py, tests.py and tools.py"
    add(lineage, 0, "Fix the bug", reply=ParsedText("", (ToolCall("Task", json.dumps({"prompt": first})),)))
    add(lineage, 1, first, reply="main.py, tests.py and tools.py")
    add(lineage, 0, "Fix the bug", "found", reply=ParsedText("", (ToolCall("Task", json.dumps({"prompt": second})),)))
    add(lineage, 2, second)
    assert roles(lineage) == [("main", None), ("subagent", 0), ("subagent", 0)]
    # With ids of its agents, whatever their tasks quote.
    add(lineage, 3, "Again: main.py, tests.py and tools.py", origin=RequestOrigin(agent="b"))
    assert roles(lineage)[3] == ("subagent", 0)


def test_a_title_that_quotes_the_last_answer_is_a_side_request() -> None:
    lineage = Lineage()
    add(lineage, 0, "Fix the bug", reply="The bug is in parse, line 3.")
    add(lineage, 1, "A title for: The bug is in parse, line 3.", reply="Parse", tools=False)
    assert roles(lineage) == [("main", None), ("side", 0)]


@pytest.mark.parametrize(
    ("model", "tools", "role"), [("p", False, "subagent"), ("s", False, "side"), ("s", True, "subagent")]
)
def test_a_request_to_a_small_model_about_what_was_passed_to_a_tool_is_a_side_request(
    model: str, tools: bool, role: str
) -> None:
    lineage = Lineage()
    fetch = ToolCall("WebFetch", json.dumps({"url": "u", "prompt": "Which version is the newest?"}))
    add(lineage, 0, "Update it", reply=ParsedText("", (fetch,)), origin=read_origin({}, "p"))
    page = "<page>1.0, 2.0</page> Which version is the newest?"
    add(lineage, 1, page, reply="2.0 is the newest", tools=tools, origin=read_origin({}, model))
    assert roles(lineage) == [("main", None), (role, 0)]


def test_what_repeats_the_task_is_no_quotation() -> None:
    """A title, a plan, or the text of a tool does not make the main conversation one of a sub-agent."""
    lineage = Lineage()
    task = "Fix the login button on mobile"
    add(lineage, 0, f"Write a title for: {task}", reply=task, tools=False)
    plan = ToolCall("plan", json.dumps({"steps": [task]}))
    add(lineage, 1, task, reply=ParsedText("", (plan,)))
    add(lineage, 2, task, "edited")
    assert roles(lineage) == [("side", 1), ("main", None), ("rewrite", 1)]
    messages = [
        {"role": "user", "content": task},
        {"role": "assistant", "content": "I ask a helper."},
        {"role": "tool", "content": "the helper says: the button is hidden"},
    ]
    add(lineage, 3, "Look at the button", reply="the button is hidden")
    lineage.add(
        4, messages, ParsedText("ok"), origin=RequestOrigin(), has_tools=True, rendered="other", is_continued=False
    )
    assert roles(lineage)[3:] == [("subagent", 1), ("rewrite", 2)]


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
