"""The verbs, global flags and exit codes: 0 done, 1 failed, 2 wrong usage or config, 130 interrupted.

Messages go to stderr, results to stdout; `--json` prints results as JSON. The module of a verb is imported only when the verb is
used, so that `rollbook --help` is quick and a verb needs only its own optional libraries.
"""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from rollbook import __version__
from rollbook.cli.arguments import verb_group
from rollbook.contracts.errors import RollbookError, UsageError, machine_fault
from rollbook.contracts.plugin import extend_search_path, load_on_demand

# Where each verb is defined, and its line in `rollbook --help`. Longer lines would be cut.
VERBS: dict[str, tuple[str, str]] = {
    "init": ("rollbook.cli.training.init:init", "Create a project that trains as it is, from a template."),
    "demo": ("rollbook.cli.training.demo:demo", "Train a small policy from scratch to guess numbers."),
    "train": ("rollbook.cli.training.train:train", "Train a policy asynchronously."),
    "sft": ("rollbook.cli.training.sft:sft", "Train a model on chats, the assistant's tokens only."),
    "eval": ("rollbook.cli.record.eval:eval_command", "Play held-out tasks with a checkpoint and print the results."),
    "dashboard": ("rollbook.cli.record.dashboard:dashboard", "Show runs in a browser: live, finished or crashed."),
    "audit": (
        "rollbook.cli.record.audit:audit",
        "Check that the record of a run is complete and consistent.",
    ),
    "act": ("rollbook.cli.record.act:act", "Pause, drain, checkpoint, quarantine a task, annotate a group."),
    "top": ("rollbook.cli.record.top:top", "Show the live panel of a run that was started elsewhere."),
    "plot": ("rollbook.cli.record.top:plot", "Draw the figures of a run as PNG or SVG."),
    "inspect": ("rollbook.cli.record.inspect:inspect", "Show a run, its groups, or one group token by token."),
    "explain": ("rollbook.cli.record.explain:explain", "Explain the history of a group."),
    "replay": (
        "rollbook.cli.record.replay:replay",
        "Train the recorded batches again, without generation.",
    ),
    "study": ("rollbook.cli.training.study:study", "Train grids of settings with several seeds and compare them."),
    "simulate": (
        "rollbook.cli.record.simulate:simulate",
        "Predict a run with other sizes from the trace of a run.",
    ),
    "push": ("rollbook.cli.record.push:push", "Upload the model of a run to the Hugging Face Hub."),
    "play": ("rollbook.cli.checks.play:play", "Play one episode in this process, token by token."),
    "debug": ("rollbook.cli.record.debug:debug", "Play a failed episode again, in a debugger if wanted."),
    "host": ("rollbook.cli.training.host:host", "Run everything but the trainer, for a trainer such as TRL."),
    "join": ("rollbook.cli.training.join:join", "Add a policy server or a dispatcher to a running run."),
    "scale": ("rollbook.cli.training.scale:scale", "Change the number of servers of a running run."),
    "proxy": ("rollbook.cli.servers.proxy:proxy", "Serve an OpenAI-compatible endpoint that records its tokens."),
    "doctor": ("rollbook.cli.checks.doctor:doctor", "Check what a run needs from this machine."),
    "config": ("rollbook.cli.checks.config:config_app", "Check configurations."),
    "env": ("rollbook.cli.servers.env:env_app", "Serve environments over OpenEnv, or play one by hand."),
    "ledger": ("rollbook.cli.servers.ledger:ledger_app", "Serve a ledger without a run, and maintain its store."),
    "tokens": ("rollbook.cli.checks.tokens:tokens_app", "Check token fidelity."),
    "models": ("rollbook.cli.training.models:models_app", "Small real models from the package index."),
    "policy": ("rollbook.cli.servers.policy:policy_app", "Serve a language model over an OpenAI-compatible API."),
}


class Verb(TyperCommand):
    """A line of `rollbook --help`. The real command is imported when it is used."""

    def __init__(self, name: str, path: str, summary: str) -> None:
        super().__init__(name=name, callback=None, help=summary)
        self._path = path

    def make_context(self, *args: Any, **options: Any) -> Any:
        return self.load().make_context(*args, **options)

    def load(self) -> Any:
        found = load_on_demand(self._path)
        if isinstance(found, typer.Typer):
            group = typer.main.get_group(found)
            group.help = self.help
            return group
        single = typer.Typer(rich_markup_mode=None, add_completion=False)
        single.command(self.name)(found)
        return typer.main.get_command(single)


class Verbs(TyperGroup):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        for name, (path, summary) in VERBS.items():
            self.add_command(Verb(name, path, summary))


app = verb_group(
    "Asynchronous reinforcement learning for LLM agents: no rollout is lost, trained twice, or left unexplained.",
    cls=Verbs,
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"rollbook {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Global flags."""
    # Commands without a run file find user modules in the current directory.
    extend_search_path([Path.cwd()])


def main() -> None:
    """Run a verb. Rollbook's own errors and faults of the machine are printed as messages; any other exception is a bug."""
    try:
        app()
    except RollbookError as error:
        load_on_demand("rollbook.cli.output").print_error(str(error))
        sys.exit(2 if isinstance(error, UsageError) else 1)
    except OSError as error:
        if (fault := machine_fault(error)) is None:
            raise
        # Without the console, whose modules may not be loaded: perhaps no more files can be opened.
        sys.stderr.write(f"error: {fault}\n")
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
