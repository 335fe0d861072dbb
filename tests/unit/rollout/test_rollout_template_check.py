"""`rollbook tokens check`: templates that keep what was sampled, and templates that do not."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rollbook.cli.main import app
from rollbook.rollout.agents.template_check import CASES, TOOL_CASES, Finding, Verdict, advice, check_template
from tests.parts.rollout.agents import FORGETS_THINKING, TOOLS_TEMPLATE, fast_words, word_tokenizer
from tests.parts.rollout.guessing import CHATML, REWRITING

TRIMS = CHATML.replace("{{ m.content }}", "{{ m.content | trim }}")
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system messages') }}{% endif %}" + CHATML


def findings(template: str) -> dict[str, Finding]:
    return {finding.case: finding for finding in check_template(word_tokenizer(template))}


def test_a_template_that_keeps_everything_holds_in_every_case() -> None:
    found = findings(TOOLS_TEMPLATE)
    assert {finding.verdict for finding in found.values()} == {Verdict.EXACT}
    assert len(found) == len(CASES) + len(TOOL_CASES["hermes"])
    assert "`linear`" in advice(list(found.values()))
    # The very thing that exact tokens are for: the template writes the call another way than the policy did.
    assert found["tool call and result"].drift is not None
    assert found["two turns"].drift is None


def test_chatml_without_tools_holds_and_says_that_tools_are_not_shown() -> None:
    found = findings(CHATML)
    assert found["tool call and result"].verdict is Verdict.UNSUPPORTED
    assert "does not render tools" in found["tool call and result"].detail
    assert all(f.verdict is Verdict.EXACT for f in found.values() if "tool" not in f.case and "call" not in f.case)


def test_calls_are_written_as_the_model_writes_them() -> None:
    """Llama 3 writes bare JSON: its template keeps it where it is read as that, and seems to rewrite it where it is not."""
    bare = (
        TOOLS_TEMPLATE.replace("<tool_call>\n", "").replace("\n</tool_call>", "").replace('"arguments"', '"parameters"')
    )
    as_json = {finding.case: finding for finding in check_template(word_tokenizer(bare), style="json")}
    assert as_json["tool call and result"].verdict is Verdict.EXACT
    assert as_json["tool call and result"].drift is not None
    assert findings(bare)["tool call and result"].verdict is Verdict.REWRITTEN


def test_a_template_that_strips_thinking_is_told_with_the_first_difference() -> None:
    found = findings(FORGETS_THINKING)
    finding = found["thinking, then a user turn"]
    assert finding.verdict is Verdict.REWRITTEN
    prompt = "<|im_start|>user\nWhich?<|im_end|>\n<|im_start|>assistant\n"
    assert f"before turn 2: at character {len(prompt)} the template renders" in finding.detail
    assert "<think>" in finding.detail
    assert found["two turns"].verdict is Verdict.EXACT
    assert "use `branching`" in advice(list(found.values()))


def test_white_space_that_a_template_trims_is_kept_as_sampled_and_shows_as_drift() -> None:
    found = findings(TRIMS)["white space around answers"]
    assert found.verdict is Verdict.EXACT
    assert found.drift is not None
    assert findings(CHATML)["white space around answers"].drift is None


def test_a_template_that_rewrites_every_answer_asks_for_rows_by_turn() -> None:
    found = findings(REWRITING)
    assert "`per_turn`" in advice([f for f in found.values() if f.verdict is not Verdict.EXACT])
    assert found["two turns"].verdict is Verdict.REWRITTEN


def test_a_template_that_refuses_messages_is_told_in_its_own_words() -> None:
    finding = findings(NO_SYSTEM)["system message"]
    assert (finding.verdict, "no system messages" in finding.detail) == (Verdict.UNSUPPORTED, True)


def model_dir(directory: Path, template: str) -> str:
    fast_words().save(str(directory / "tokenizer.json"))
    config = {"chat_template": template, "eos_token": "<|im_end|>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return str(directory)


@pytest.mark.parametrize(("template", "code"), [(TOOLS_TEMPLATE, 0), (FORGETS_THINKING, 1)])
def test_the_command_prints_a_table_and_its_exit_code_tells_whether_all_held(
    tmp_path: Path, template: str, code: int
) -> None:
    told = CliRunner().invoke(app, ["tokens", "check", "--model", model_dir(tmp_path, template)])
    assert told.exit_code == code
    assert [line for line in told.stdout.splitlines() if line.startswith("two turns") and "exact" in line]
    as_json = CliRunner().invoke(app, ["tokens", "check", "--model", str(tmp_path), "--json"])
    assert json.loads(as_json.stdout)["exact"] is (code == 0)
