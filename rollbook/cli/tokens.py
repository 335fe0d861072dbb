"""`rollbook tokens check`: does a model's chat template keep what was sampled?"""

from typing import Annotated

import typer

from rollbook.cli.speaking import EXIT_FAILED, result, result_json
from rollbook.run.commands.check_tokens import check_tokens, finding_lines, finding_row, holds

tokens_app = typer.Typer(
    help="Token fidelity: what the engine consumed and produced, and nothing else.", no_args_is_help=True
)


@tokens_app.callback()
def tokens() -> None:
    """Token fidelity."""


@tokens_app.command()
def check(
    model: Annotated[str, typer.Option("--model", help="A directory with tokenizer.json and a chat template.")],
    tool_parser: Annotated[
        str, typer.Option("--tool-parser", help="How the model writes tool calls: hermes, json, none, module:function.")
    ] = "hermes",
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as one JSON line.")] = False,
) -> None:
    """Play conversations through the chat template; exit code 1 where earlier turns are rewritten."""
    findings = check_tokens(model, tool_parser=tool_parser)
    if as_json:
        result_json(finding_row(findings))
    else:
        for line in finding_lines(findings):
            result(line)
    if not holds(findings):
        raise typer.Exit(EXIT_FAILED)
