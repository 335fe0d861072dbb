"""Parsers of text that a policy writes: all are listed, and no regular expression of the package can take exponential time.

Servers and workers parse sampled text in their event loop, so one text must not block it. `tests/properties/test_text_parsers.py`
grows the input of every parser of `PARSERS`.
"""

import ast
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import yaml

from rollbook.contracts.output_formats import IncrementalDecoder, StopStrings, parse_call, parse_tool_calls
from rollbook.contracts.task import Observation
from rollbook.envs.builtin.arithmetic import Arithmetic
from rollbook.envs.builtin.awscli.cloud.account import _is_named, _place
from rollbook.envs.builtin.awscli.cloud.worker import ApiAnswer
from rollbook.envs.builtin.awscli.commands import Command, CommandVerb, matching_options, parse_move
from rollbook.envs.builtin.awscli.short_text import goal_of, one_line
from rollbook.envs.builtin.awscli.solution import output_of
from rollbook.envs.builtin.awscli.tasks.checks import holds, is_right
from rollbook.envs.builtin.awscli.tasks.task_bank import Check
from rollbook.envs.builtin.code import module_of, results_of
from rollbook.envs.builtin.maths import as_number, final_answer, is_same_answer
from rollbook.envs.builtin.number_guessing import parse_guess
from rollbook.envs.builtin.terminal.commands import run_line
from rollbook.envs.builtin.terminal.environment import command_of
from rollbook.envs.builtin.terminal.files import CommandError, FileTree
from rollbook.inference.server.text import ToolCallStream, template_messages
from rollbook.rollout.agents.anthropic_messages import Thinking, _input
from rollbook.rollout.agents.history import PlayedTurn, _continued_thought
from rollbook.rollout.agents.lineage import _parts, _texts, _words
from rollbook.rollout.agents.messages import digests, normalised
from rollbook.rollout.agents.program import printed_result
from rollbook.rollout.agents.responses import _custom_input
from rollbook.rollout.agents.streaming import unsent_text
from rollbook.rollout.agents.tool_calls import PARSERS as TOOL_PARSERS
from rollbook.rollout.agents.tool_calls import canonical_arguments
from rollbook.rollout.assemblers.assembler import after_sampled_end
from rollbook.rollout.assemblers.chat import _after
from rollbook.rollout.chat.provenance import _message_spans
from rollbook.rollout.chat.tokenizer import _with_reasoning
from rollbook.rollout.episodes.mcp_tools import read_arguments
from rollbook.rollout.rewards.group_functions import diversity
from rollbook.rollout.rewards.judge_prompts import parse_verdict, parse_verdicts
from rollbook.rollout.rewards.messages import RewardCase

PACKAGE = Path(__file__).parents[2] / "rollbook"
FOLDERS = (
    "contracts/output_formats.py",
    "demo",
    "envs/builtin",
    "inference/server",
    "integrations",
    "rollout/agents",
    "rollout/assemblers",
    "rollout/chat",
    "rollout/episodes",
    "rollout/rewards",
    "templates",
)
"""Where sampled text arrives."""
OPERATIONS = frozenset(
    [
        "findall",
        "finditer",
        "search",
        "match",
        "fullmatch",
        "sub",
        "subn",
        "split",
        "rsplit",
        "splitlines",
        "find",
        "rfind",
        "index",
        "partition",
        "rpartition",
        "loads",
        "load_json",
    ]
)


def _characters(parse: Callable[[str], Any]) -> Callable[[str], None]:
    """Feeds a text one character at a time, as a stream of tokens does."""

    def feed(text: str) -> None:
        for char in text:
            parse(char)

    return feed


def _stream(text: str) -> None:
    stream = ToolCallStream()
    _characters(stream.feed)(text)
    stream.finish()


def _stops(*stops: str) -> Callable[[str], None]:
    return _characters(StopStrings(stops).feed)


def _decoder(text: str) -> None:
    raw = text.encode("utf-8", "replace").replace(b"?", b"\xff")
    decoder = IncrementalDecoder(lambda ids: bytes(ids).decode(errors="replace"))
    for byte in raw:
        decoder.feed([byte])
    decoder.finish()


def _arithmetic(text: str) -> Observation:
    env = Arithmetic()
    env.reset({"left": 1, "sign": "+", "right": 1})
    return env.step(text)


def _terminal(command: str, text: str) -> None:
    tree = FileTree()
    tree.write("f", text)
    try:
        run_line(tree, command)
        run_line(tree, text)
    except CommandError:
        pass


def _template(name: str, function: str) -> Callable[..., Any]:
    """A function of a project template, whose modules are not part of the package."""
    namespace: dict[str, Any] = {"__name__": name}
    exec((PACKAGE / "templates" / name).read_text(encoding="utf-8"), namespace)
    found: Callable[..., Any] = namespace[function]
    return found


def _guess(text: str) -> Observation:
    game = _template("multi_turn/environment.py", "NumberGuessing")()
    game.reset({"secret": 1})
    step: Callable[[str], Observation] = game.step
    return step(text)


def _matches(text: str) -> bool:
    check = Check.model_validate({"says": "it is", "call": "s3.list_buckets", "query": "x", "matches": "^www\\.a\\.?$"})
    return holds(check, ApiAnswer(result={"x": text}), {})


def _reward(name: str) -> Callable[[str], Any]:
    correct = _template(name, "correct")
    return lambda text: correct(SimpleNamespace(response=text, row={"answer": "1", "degrees": 1}, facts={}))


def _chat(text: str) -> Any:
    call = {"function": {"name": "f", "arguments": text}}
    return digests(normalised([{"role": "assistant", "content": text, "tool_calls": [call]}]), None)


def _verdict(text: str) -> None:
    for written in (text, "{" + text + "}"):
        with suppress(ValueError):
            parse_verdict(written, low=0.0, high=1.0)
        with suppress(ValueError):
            parse_verdicts(written, [1, 2], low=0.0, high=1.0)


def _typed_value(text: str) -> Any:
    tool = {"function": {"name": "f", "parameters": {"properties": {"a": {"type": "integer"}}}}}
    return TOOL_PARSERS["qwen"](
        f"<tool_call><function=f><parameter=a>{text}</parameter></function></tool_call>", [tool]
    )


SCORE = _template("atropos/environment.py", "score")
PARSERS: Mapping[str, Callable[[str], Any]] = {
    "contracts/output_formats.py:tagged_spans": parse_tool_calls,
    "contracts/output_formats.py:parse_call": parse_call,
    "contracts/output_formats.py:feed": _stops("<tool_call>", "\n\n", " " * 40 + "x", "{" * 40 + "}"),
    "contracts/output_formats.py:IncrementalDecoder": _decoder,
    "envs/builtin/arithmetic.py:step": _arithmetic,
    "envs/builtin/awscli/cloud/account.py:_is_named": partial(_is_named, "queue/a-b"),
    "envs/builtin/awscli/cloud/account.py:_place": lambda text: _place(text.split()),
    "envs/builtin/awscli/commands.py:_command_lines": parse_move,
    "envs/builtin/awscli/commands.py:_refused": lambda text: parse_move(f"aws s3 ls {text}"),
    "envs/builtin/awscli/commands.py:is_read_only": lambda text: (
        Command(verb=CommandVerb.AWS, text=text, argv=tuple(text.split())).is_read_only
    ),
    "envs/builtin/awscli/commands.py:matching_options": lambda text: matching_options(text, ["--region"]),
    "envs/builtin/awscli/commands.py:parse_move": lambda text: parse_move(f"answer {text}"),
    "envs/builtin/awscli/commands.py:split": lambda text: parse_move("aws x " + text.replace("\n", " ")),
    "envs/builtin/awscli/commands.py:without_thinking": lambda text: parse_move(f"<think>{text}"),
    "envs/builtin/awscli/short_text.py:_without_usage": partial(one_line, max_chars=100, ignored=re.compile("date")),
    "envs/builtin/awscli/short_text.py:goal_of": goal_of,
    "envs/builtin/awscli/short_text.py:one_line": partial(one_line, max_chars=100, ignored=re.compile("date")),
    "envs/builtin/awscli/solution.py:output_of": output_of,
    "envs/builtin/awscli/tasks/checks.py:holds": _matches,
    "envs/builtin/awscli/tasks/checks.py:is_right": partial(is_right, ["a", "b"]),
    "envs/builtin/code.py:module_of": module_of,
    "envs/builtin/code.py:results_of": lambda text: results_of(f"mark{text}", "mark"),
    "envs/builtin/maths.py:as_number": as_number,
    "envs/builtin/maths.py:final_answer": final_answer,
    "envs/builtin/maths.py:last_boxed": final_answer,
    "envs/builtin/maths.py:last_tagged": final_answer,
    "envs/builtin/maths.py:plain": lambda text: is_same_answer(text, "a"),
    "envs/builtin/number_guessing.py:parse_guess": parse_guess,
    "envs/builtin/terminal/commands.py:_count": partial(_terminal, "head -n 3 f"),
    "envs/builtin/terminal/commands.py:_leading_number": partial(_terminal, "sort -n f"),
    "envs/builtin/terminal/commands.py:grep": partial(_terminal, "grep -i a f"),
    "envs/builtin/terminal/commands.py:head": partial(_terminal, "head f"),
    "envs/builtin/terminal/commands.py:sort": partial(_terminal, "sort -u f"),
    "envs/builtin/terminal/commands.py:tail": partial(_terminal, "tail f"),
    "envs/builtin/terminal/commands.py:uniq": partial(_terminal, "uniq f"),
    "envs/builtin/terminal/commands.py:wc": partial(_terminal, "wc f"),
    "envs/builtin/terminal/environment.py:command_of": command_of,
    "inference/server/text.py:_template_call": lambda text: template_messages(
        [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": text}}]}]
    ),
    "inference/server/text.py:ToolCallStream": _stream,
    "rollout/agents/anthropic_messages.py:_content": Thinking.split,
    "rollout/agents/anthropic_messages.py:_input": _input,
    "rollout/agents/anthropic_messages.py:joined": lambda text: Thinking.joined({"thinking": text, "signature": text}),
    "rollout/agents/anthropic_messages.py:split": Thinking.split,
    "rollout/agents/history.py:_continued_thought": lambda text: _continued_thought(
        PlayedTurn(tokens=[], rendered="<think>", reply=text, end_text="")
    ),
    "rollout/agents/history.py:_rest": TOOL_PARSERS["hermes"],
    "rollout/agents/lineage.py:_parts": _parts,
    "rollout/agents/lineage.py:_words": _words,
    "rollout/agents/lineage.py:_texts": lambda text: list(_texts(text)),
    "rollout/agents/messages.py:_call": _chat,
    "rollout/agents/program.py:printed_result": lambda text: printed_result(text.encode()),
    "rollout/agents/responses.py:_custom_input": _custom_input,
    "rollout/agents/streaming.py:unsent_text": lambda text: unsent_text(text, text[: len(text) // 2]),
    "rollout/agents/tool_calls.py:canonical_arguments": canonical_arguments,
    "rollout/agents/tool_calls.py:answer_span": TOOL_PARSERS["json"],
    "rollout/agents/tool_calls.py:_objects": TOOL_PARSERS["llama"],
    "rollout/agents/tool_calls.py:_listed": lambda text: TOOL_PARSERS["llama"](f"[{text}]"),
    "rollout/agents/tool_calls.py:_function": lambda text: TOOL_PARSERS["qwen"](
        f"<tool_call><function=f>{text}</function></tool_call>"
    ),
    "rollout/agents/tool_calls.py:_typed": _typed_value,
    "rollout/assemblers/assembler.py:after_sampled_end": lambda text: after_sampled_end(text, "<eos>"),
    "rollout/assemblers/chat.py:_after": lambda text: _after(text, f" {text[:-1]} "),
    "rollout/rewards/group_functions.py:_shingles": lambda text: diversity([RewardCase(row={}, response=text)] * 2),
    "rollout/rewards/judge_prompts.py:_object": _verdict,
    "rollout/chat/tokenizer.py:_with_reasoning": lambda text: _with_reasoning({"role": "assistant", "content": text}),
    "rollout/chat/provenance.py:_message_spans": lambda text: _message_spans([{"content": text[1:]}] * 3, text),
    "rollout/episodes/mcp_tools.py:read_arguments": read_arguments,
    "templates/atropos/environment.py:score": lambda text: SCORE(1, text),
    "templates/multi_turn/environment.py:step": _guess,
    "templates/single_turn/rewards.py:correct": _reward("single_turn/rewards.py"),
    "templates/tools/rewards.py:correct": _reward("tools/rewards.py"),
}
"""Every function that parses sampled text, and how a test calls it."""
OTHER_TEXT: Mapping[str, str] = {
    "envs/builtin/awscli/cloud/account.py:_listed": "JMESPath of the task bank",
    "envs/builtin/awscli/cloud/account.py:_parts": "JMESPath of the task bank",
    "envs/builtin/awscli/cloud/simulator_guard.py:is_admin_path": "the path of a request, limited by aiohttp",
    "envs/builtin/awscli/cloud/simulator_guard.py:is_from_browser": "a header, limited by aiohttp",
    "envs/builtin/awscli/cloud/simulator_process.py:main": "arguments of the process",
    "envs/builtin/awscli/cloud/warm_cli.py:_without_notice": "output of the AWS command line",
    "envs/builtin/awscli/cloud/worker.py:_request": "messages of our own process",
    "envs/builtin/awscli/cloud/worker_process.py:_reply": "messages of our own process",
    "envs/builtin/awscli/cloud/worker_process.py:main": "messages of our own process",
    "envs/builtin/awscli/environment.py:_play": "a line of the task bank",
    "envs/builtin/awscli/environment.py:example_tasks": "goals of the task bank",
    "envs/builtin/awscli/environment.py:goal": "goals of the task bank",
    "envs/builtin/awscli/short_text.py:_leaves": "field names of the AWS API",
    "envs/builtin/awscli/tasks/checks.py:_select": "JMESPath of the task bank",
    "envs/builtin/awscli/tasks/checks.py:call_of": "calls of the task bank",
    "envs/builtin/awscli/tasks/checks.py:fill": "templates of the task bank",
    "envs/builtin/awscli/tasks/checks.py:value_of": "one JSON document, parsed once",
    "envs/builtin/awscli/tasks/setup.py:_run_setup_step": "a line of the task bank",
    "envs/builtin/awscli/tasks/setup.py:kept_values": "one JSON document, parsed once",
    "envs/builtin/code_tasks.py:_cases": "arguments of our own tasks",
    "envs/builtin/code_tasks.py:_outcome": "arguments of our own tasks",
    "inference/server/grammars.py:_first_line": "an error message of llguidance",
    "inference/server/routes/responses.py:response_to": "an error message of msgspec or of ours",
    "inference/server/weight_updates.py:find_copy": "no text",
    "rollout/agents/session.py:_grammar": "an error message of ours",
    "rollout/agents/lineage.py:read_origin": "a header, limited by aiohttp",
    "rollout/agents/program.py:_has_variable": "environment variables of a process",
    "rollout/agents/sandboxed.py:_first_line": "the first line of an installed program",
    "rollout/agents/session.py:_checked": "an error message of ours",
    "rollout/chat/demonstrations.py:_lines": "a file of the user",
    "rollout/chat/demonstrations.py:_object": "a file of the user",
    "rollout/chat/demonstrations.py:_policy_text": "a file of the user",
    "rollout/chat/tokenizer.py:_read_json": "files of the model",
    "rollout/rewards/judgements.py:_read_new": "our own file",
    "rollout/rewards/judgements.py:add": "no text",
    "rollout/rewards/judges.py:_request": "the body of a judge's response, limited in size",
    "rollout/rewards/judges.py:_answer": "no text",
    "rollout/rewards/teacher.py:_request": "the response of a policy server",
    "rollout/rewards/teacher.py:_scores": "no text",
    "rollout/chat/tokenizer.py:token_bytes": "one token of the vocabulary",
    "templates/atropos/environment.py:main": "a file of the run",
}
"""Functions of the same folders that parse something else."""
SLOW_PATTERNS_OF_OWN_TEXT = {"commands/training/init.py": "reads the templates of this package"}
PATTERNS_MADE_AT_RUNTIME = {
    "envs/builtin/awscli/cloud/account.py": "an escaped name between two look-arounds",
    "envs/builtin/awscli/tasks/checks.py": "`matches` of the task bank, which are checked below",
    "envs/sandboxes/process.py": "an escaped constant",
    "inference/vllm/adapters.py": "metrics of a vLLM server",
    "inference/weights/lora.py": "module names of an adapter's own configuration",
    "ledger/stores/postgres/schema.py": "our own SQL",
    "run/config/toml_lines.py": "the user's configuration",
}


def _functions(path: Path) -> Iterator[tuple[str, set[str]]]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield (
                node.name,
                {
                    call.func.attr if isinstance(call.func, ast.Attribute) else call.func.id
                    for call in ast.walk(node)
                    if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute | ast.Name)
                },
            )


def test_every_function_that_parses_sampled_text_is_listed_and_grown() -> None:
    found = set()
    for folder in FOLDERS:
        root = PACKAGE / folder
        for path in [root] if root.is_file() else sorted(root.rglob("*.py")):
            if path.name.startswith("test_"):
                continue
            name = path.relative_to(PACKAGE).as_posix()
            found |= {f"{name}:{function}" for function, calls in _functions(path) if calls & OPERATIONS}
    assert found - PARSERS.keys() - OTHER_TEXT.keys() == set(), (
        "add them to PARSERS, or to OTHER_TEXT with what they parse"
    )
    assert OTHER_TEXT.keys() - found == set(), "these are gone"
    paths = {PACKAGE / name.partition(":")[0] for name in PARSERS}
    assert [path for path in paths if not path.exists()] == []


def _repeats(parsed: Any, *, is_inside: bool = False) -> Iterator[str]:
    """The repetitions that can make a search take polynomial or exponential time: lazy ones, and unbounded ones in each other."""
    for operation, argument in parsed:
        name = str(operation)
        if name in {"MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT"}:
            _low, high, inner = argument
            is_unbounded = high == re._constants.MAXREPEAT  # type: ignore[attr-defined]
            if name == "MIN_REPEAT":
                yield "lazy repetition"
            if is_unbounded and is_inside:
                yield "nested repetition"
            yield from _repeats(inner, is_inside=is_inside or is_unbounded)
        elif name == "SUBPATTERN":
            yield from _repeats(argument[-1], is_inside=is_inside)
        elif name == "BRANCH":
            for branch in argument[1]:
                yield from _repeats(branch, is_inside=is_inside)
        elif name in {"ASSERT", "ASSERT_NOT"}:
            yield from _repeats(argument[1], is_inside=is_inside)
        elif name == "ATOMIC_GROUP":
            yield from _repeats(argument, is_inside=is_inside)


def slow_parts(pattern: str) -> list[str]:
    return list(_repeats(re._parser.parse(pattern, re.VERBOSE if "\n" in pattern else 0)))  # type: ignore[attr-defined]


def test_slow_patterns_are_recognised() -> None:
    for pattern in (r"<a>\s*(.*?)\s*</a>", r"(a+)+", r"(?:x|a*b)*", r"(?:\w+,)*", r"a{2,5}?"):
        assert slow_parts(pattern), pattern
    for pattern in (r"a*b*", r'"(?:[^"\\]|\\.)*"', r"(?:ab){1,3}", r"[+-]?\d{1,18}(?:/\d{1,30})?"):
        assert not slow_parts(pattern), pattern


def test_no_regular_expression_has_nested_or_lazy_repetition() -> None:
    slow: list[str] = []
    made_at_runtime = set()
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case ast.Call(func=ast.Attribute(value=ast.Name(id="re"), attr=attribute), args=[first, *_]) if (
                    attribute in OPERATIONS | {"compile"}
                ):
                    if isinstance(first, ast.Constant) and isinstance(first.value, str | bytes):
                        text = first.value if isinstance(first.value, str) else first.value.decode()
                        if name not in SLOW_PATTERNS_OF_OWN_TEXT:
                            slow += [f"{name}:{node.lineno}: {part} in {text!r}" for part in slow_parts(text)]
                    else:
                        made_at_runtime.add(name)
    assert slow == []
    assert made_at_runtime == PATTERNS_MADE_AT_RUNTIME.keys()


def test_the_patterns_of_the_task_bank_are_not_slow() -> None:
    slow = []
    for path in sorted((PACKAGE / "envs/builtin/awscli/tasks/bank").glob("*.yaml")):
        for pattern in _values_of("matches", yaml.safe_load(path.read_text(encoding="utf-8"))):
            slow += [f"{path.name}: {part} in {pattern!r}" for part in slow_parts(pattern)]
    assert slow == []


def _values_of(name: str, value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for key, inner in value.items():
            if key == name and isinstance(inner, str):
                yield inner
            yield from _values_of(name, inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _values_of(name, inner)
