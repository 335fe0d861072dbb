"""`rollbook play`: one episode, printed token by token."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from rollbook.cli.arguments import Overrides
from rollbook.contracts.plugin import load_on_demand


def play(
    config: Annotated[
        Path, typer.Argument(help="The run's TOML file, or a run directory: its newest checkpoint plays.")
    ],
    *,
    task: Annotated[str | None, typer.Option("--task", help="The id of the task; default: the first.")] = None,
    greedy: Annotated[
        bool, typer.Option("--greedy/--sampled", help="Greedy decoding, or sampling as in training.")
    ] = False,
    override: Overrides = None,
) -> None:
    """Play one episode in this process, without a trainer, and print each token as it is sampled."""

    def write(text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    # Needs the extra `train`, which the help of this verb must not need.
    play_episode = load_on_demand("rollbook.commands.checks.play:play_episode")
    play_episode(config, overrides=override or (), task=task, is_greedy=greedy, write=write)
