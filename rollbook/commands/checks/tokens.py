"""`rollbook tokens check`: checks whether a model's chat template keeps earlier turns token for token."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

from rollbook.commands.arguments import Option
from rollbook.commands.output import EXIT_FAILED, result, result_json
from rollbook.contracts.errors import RunError
from rollbook.rollout.agents.template_check import TemplateFinding, TemplateVerdict, advice, check_template
from rollbook.rollout.agents.tool_calls import load_parser
from rollbook.run.episodes import model_tokenizer


def check_tokens(model: str, *, tool_parser: str) -> list[TemplateFinding]:
    directory = Path(model)
    if not directory.is_dir():
        raise RunError(f"{model} is not a directory; it must contain tokenizer.json and a chat template")
    tokenizer = model_tokenizer(directory)
    if not tokenizer.eos_token_ids:
        raise RunError(f"{model} has no end token; set eos_token in tokenizer_config.json")
    return check_template(tokenizer, style=tool_parser, parser=load_parser(tool_parser))


def is_exact(findings: Sequence[TemplateFinding]) -> bool:
    return all(finding.verdict is not TemplateVerdict.REWRITTEN for finding in findings)


def finding_lines(findings: Sequence[TemplateFinding]) -> Iterator[str]:
    width = max(len(finding.case) for finding in findings)
    yield f"{'case':<{width}}  {'continuation':<12}  re-tokenised"
    for finding in findings:
        drift = "" if finding.verdict is not TemplateVerdict.EXACT else "the same"
        if finding.drift is not None:
            drift = f"differs at token {finding.drift}"
        yield f"{finding.case:<{width}}  {finding.verdict:<12}  {drift}".rstrip()
        if finding.detail:
            yield f"{'':<{width}}  {finding.detail}"
    yield advice(findings)


def finding_row(findings: Sequence[TemplateFinding]) -> dict[str, Any]:
    cases = {f.case: {"verdict": f.verdict, "detail": f.detail, "drift": f.drift} for f in findings}
    return {"exact": is_exact(findings), "advice": advice(findings), "cases": cases}


def check_command(
    model: Annotated[str, Option("--model", help="A directory with tokenizer.json and a chat template.")],
    tool_parser: Annotated[
        str, Option("--tool-parser", help="Format of tool calls: hermes, json, llama, qwen, none, or module:function.")
    ] = "hermes",
    as_json: Annotated[bool, Option("--json", help="Print the findings as one JSON line.")] = False,
) -> int:
    """Render conversations with the chat template; exit code 1 if earlier turns are rewritten."""
    findings = check_tokens(model, tool_parser=tool_parser)
    if as_json:
        result_json(finding_row(findings))
    else:
        for line in finding_lines(findings):
            result(line)
    return 0 if is_exact(findings) else EXIT_FAILED


COMMANDS = {"check": check_command}
