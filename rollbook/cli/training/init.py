"""`rollbook init`: a project that trains as it is."""

from pathlib import Path
from typing import Annotated

import typer

from rollbook.cli.output import result, stderr_console
from rollbook.commands.training.init import init_project, template_names


def init(
    name: Annotated[
        Path, typer.Argument(metavar="NAME", help="The new directory. Its last part is the name of the run.")
    ],
    template: Annotated[
        str, typer.Option("--template", help=f"One of: {', '.join(template_names())}.")
    ] = "single_turn",
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            help="Train this Hugging Face model directory instead of a small model that is built for the run.",
        ),
    ] = None,
) -> None:
    """Create a project that trains as it is: environment or tasks, reward, run file, test and README.

    single_turn: a question, an answer, a reward. multi_turn: an environment. tools: a model that calls tools. agent_proxy: an agent
    that uses OpenAI's API. atropos: an environment that posts groups to the run.
    """
    for path in init_project(name, template=template, model=model):
        result(str(path))
    console = stderr_console()
    console.print(
        f"\nNext: cd {name}, then rollbook train run.toml. README.md explains the files.", markup=False, soft_wrap=True
    )
