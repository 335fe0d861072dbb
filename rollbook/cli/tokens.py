"""`rollbook tokens check`: checks whether a model's chat template keeps sampled tokens unchanged."""

from typing import Annotated

import typer

from rollbook.cli.output import EXIT_FAILED, result, result_json
from rollbook.run.commands.check_tokens import check_tokens, finding_lines, finding_row, is_exact

tokens_app = typer.Typer(help="Check token fidelity.", no_args_is_help=True)


@tokens_app.callback()
def tokens() -> None:
    """Check token fidelity."""


@tokens_app.command()
def check(
    model: Annotated[str, typer.Option("--model", help="A directory with tokenizer.json and a chat template.")],
    tool_parser: Annotated[
        str, typer.Option("--tool-parser", help="Format of tool calls: hermes, json, none, or module:function.")
    ] = "hermes",
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as one JSON line.")] = False,
) -> None:
    """Render conversations with the chat template; exit code 1 if earlier turns are rewritten."""
    findings = check_tokens(model, tool_parser=tool_parser)
    if as_json:
        result_json(finding_row(findings))
    else:
        for line in finding_lines(findings):
            result(line)
    if not is_exact(findings):
        raise typer.Exit(EXIT_FAILED)
