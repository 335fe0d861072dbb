"""`rollbook tokens check`: templates that keep sampled replies, and templates that do not."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rollbook.cli.main import app
from rollbook.rollout.agents.template_check import (
    CASES,
    TOOL_CASES,
    TemplateFinding,
    TemplateVerdict,
    advice,
    check_template,
)
from tests.parts.rollout.agents import FORGETS_THINKING, TOOLS_TEMPLATE, bpe_vocabulary, word_tokenizer
from tests.parts.rollout.guessing import CHATML, REWRITING

TRIMS = CHATML.replace("{{ m.content }}", "{{ m.content | trim }}")
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system messages') }}{% endif %}" + CHATML


def findings(template: str) -> dict[str, TemplateFinding]:
    return {finding.case: finding for finding in check_template(word_tokenizer(template))}


def test_a_template_that_keeps_replies_is_exact_in_every_case() -> None:
    found = findings(TOOLS_TEMPLATE)
    assert {finding.verdict for finding in found.values()} == {TemplateVerdict.EXACT}
    assert len(found) == len(CASES) + len(TOOL_CASES["hermes"])
    assert "`linear`" in advice(list(found.values()))
    # The template writes the call in another layout than the policy, so tokenising again would drift.
    assert found["tool call and result"].drift is not None
    assert found["two turns"].drift is None


def test_chatml_is_exact_and_does_not_render_tools() -> None:
    found = findings(CHATML)
    assert found["tool call and result"].verdict is TemplateVerdict.UNSUPPORTED
    assert "does not render tools" in found["tool call and result"].detail
    assert all(
        f.verdict is TemplateVerdict.EXACT for f in found.values() if "tool" not in f.case and "call" not in f.case
    )


def test_tool_calls_are_checked_in_the_format_of_the_model() -> None:
    """Llama 3 writes bare JSON: its template is exact with the parser for that, and seems to rewrite with another one."""
    bare = (
        TOOLS_TEMPLATE.replace("<tool_call>\n", "").replace("\n</tool_call>", "").replace('"arguments"', '"parameters"')
    )
    for style in ("json", "llama"):
        found = {finding.case: finding for finding in check_template(word_tokenizer(bare), style=style)}
        assert found["tool call and result"].verdict is TemplateVerdict.EXACT
        assert found["tool call and result"].drift is not None
    assert findings(bare)["tool call and result"].verdict is TemplateVerdict.REWRITTEN


def test_a_template_that_drops_thinking_is_reported_with_the_first_difference() -> None:
    found = findings(FORGETS_THINKING)
    finding = found["thinking, then a user turn"]
    assert finding.verdict is TemplateVerdict.REWRITTEN
    prompt = "<|im_start|>user\nWhich?<|im_end|>\n<|im_start|>assistant\n"
    assert f"before turn 2: at character {len(prompt)} the template renders" in finding.detail
    assert "<think>" in finding.detail
    assert found["two turns"].verdict is TemplateVerdict.EXACT
    assert "use `branching`" in advice(list(found.values()))


def test_trimmed_white_space_is_kept_as_sampled_and_reported_as_drift() -> None:
    found = findings(TRIMS)["white space around answers"]
    assert found.verdict is TemplateVerdict.EXACT
    assert found.drift is not None
    assert findings(CHATML)["white space around answers"].drift is None


def test_the_advice_for_a_template_that_rewrites_every_reply_is_per_turn() -> None:
    found = findings(REWRITING)
    assert "`per_turn`" in advice([f for f in found.values() if f.verdict is not TemplateVerdict.EXACT])
    assert found["two turns"].verdict is TemplateVerdict.REWRITTEN


def test_the_error_of_a_template_that_refuses_messages_is_reported() -> None:
    finding = findings(NO_SYSTEM)["system message"]
    assert (finding.verdict, "no system messages" in finding.detail) == (TemplateVerdict.UNSUPPORTED, True)


def model_dir(directory: Path, template: str) -> str:
    bpe_vocabulary().save(str(directory / "tokenizer.json"))
    config = {"chat_template": template, "eos_token": "<|im_end|>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return str(directory)


@pytest.mark.parametrize(("template", "code"), [(TOOLS_TEMPLATE, 0), (FORGETS_THINKING, 1)])
def test_the_command_prints_a_table_and_its_exit_code_says_whether_all_cases_are_exact(
    tmp_path: Path, template: str, code: int
) -> None:
    result = CliRunner().invoke(app, ["tokens", "check", "--model", model_dir(tmp_path, template)])
    assert result.exit_code == code
    assert [line for line in result.stdout.splitlines() if line.startswith("two turns") and "exact" in line]
    as_json = CliRunner().invoke(app, ["tokens", "check", "--model", str(tmp_path), "--json"])
    assert json.loads(as_json.stdout)["exact"] is (code == 0)
