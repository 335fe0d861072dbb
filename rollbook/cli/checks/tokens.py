"""`rollbook tokens check`: checks whether a model's chat template keeps sampled tokens unchanged."""

from typing import Annotated

import typer

from rollbook.cli.arguments import verb_group
from rollbook.cli.output import EXIT_FAILED, result, result_json
from rollbook.contracts.plugin import load_on_demand

tokens_app = verb_group()


@tokens_app.command()
def check(
    model: Annotated[str, typer.Option("--model", help="A directory with tokenizer.json and a chat template.")],
    tool_parser: Annotated[
        str, typer.Option("--tool-parser", help="Format of tool calls: hermes, json, none, or module:function.")
    ] = "hermes",
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as one JSON line.")] = False,
) -> None:
    """Render conversations with the chat template; exit code 1 if earlier turns are rewritten."""
    # Needs the extra `rollout`, which the help of this verb must not need.
    command = load_on_demand("rollbook.commands.checks.tokens")
    findings = command.check_tokens(model, tool_parser=tool_parser)
    if as_json:
        result_json(command.finding_row(findings))
    else:
        for line in command.finding_lines(findings):
            result(line)
    if not command.is_exact(findings):
        raise typer.Exit(EXIT_FAILED)
