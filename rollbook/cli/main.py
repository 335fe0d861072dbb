"""The command line: commands, global flags and exit codes: 0 done, 1 failed, 2 wrong usage or config, 130 interrupted.

Messages go to stderr, results to stdout; `--json` prints results as JSON. The module of a command is imported only when it
is used, so that `rollbook --help` is quick and a command needs only its own optional libraries.
"""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from rollbook import __version__
from rollbook.cli.translation import typer_app, typer_command
from rollbook.contracts.errors import RollbookError, UsageError, machine_fault
from rollbook.contracts.plugin import extend_search_path, load_on_demand

# Where each command is defined in `rollbook/commands`, and its line in `rollbook --help`. Longer lines would be cut.
COMMANDS: dict[str, tuple[str, str]] = {
    "init": ("training.init:init_command", "Create a project that trains as it is, from a template."),
    "demo": ("training.demo:demo_command", "Train a small policy from scratch to guess numbers."),
    "train": ("training.train_command:train_command", "Train a policy asynchronously."),
    "sft": ("training.sft:sft_command", "Train a model on chats, the assistant's tokens only."),
    "eval": ("record.evaluate:eval_command", "Play held-out tasks with a checkpoint and print the results."),
    "dashboard": ("record.dashboard:dashboard_command", "Show runs in a browser: live, finished or crashed."),
    "audit": ("record.audit:audit_command", "Check that the record of a run is complete and consistent."),
    "act": ("record.act:act_command", "Pause, drain, checkpoint, quarantine a task, annotate a group."),
    "top": ("record.top:top_command", "Show the live panel of a run that was started elsewhere."),
    "plot": ("record.plot:plot_command", "Draw the figures of a run as PNG or SVG."),
    "inspect": ("record.inspect:inspect_command", "Show a run, its groups, or one group token by token."),
    "explain": ("record.explain:explain_command", "Explain the history of a group."),
    "replay": ("record.replay:replay_command", "Train the recorded batches again, without generation."),
    "study": ("training.study:study_command", "Train grids of settings with several seeds and compare them."),
    "simulate": ("record.simulate:simulate_command", "Predict a run with other sizes from the trace of a run."),
    "export": ("record.export:export_command", "Write demonstrations from the best rollouts of a run."),
    "push": ("record.push:push_command", "Upload the model of a run to the Hugging Face Hub."),
    "play": ("checks.play:play_command", "Play one episode in this process, token by token."),
    "debug": ("record.debug:debug_command", "Play a failed episode again, in a debugger if wanted."),
    "host": ("training.host:host_command", "Run everything but the trainer, for a trainer such as TRL."),
    "join": ("training.join:join_command", "Add a policy server or a dispatcher to a running run."),
    "scale": ("training.scale:scale_command", "Change the number of servers of a running run."),
    "proxy": ("servers.proxy:proxy_command", "Serve an OpenAI-compatible endpoint that records its tokens."),
    "doctor": ("checks.doctor:doctor_command", "Check what a run needs from this machine."),
    "config": ("checks.config:COMMANDS", "Check configurations."),
    "env": ("servers.env:COMMANDS", "Serve environments over OpenEnv, or play one by hand."),
    "ledger": ("servers.ledger:COMMANDS", "Serve a ledger without a run, and maintain its store."),
    "tasks": ("checks.tasks:COMMANDS", "Check tasks, and that their reference solutions pass."),
    "tokens": ("checks.tokens:COMMANDS", "Check token fidelity."),
    "models": ("training.models:COMMANDS", "Small real models from the package index."),
    "policy": ("servers.policy:COMMANDS", "Serve a language model over an OpenAI-compatible API."),
}


class LazyCommand(TyperCommand):
    """A line of `rollbook --help`. The module of the command is imported when the command is used."""

    def __init__(self, name: str, path: str, summary: str) -> None:
        super().__init__(name=name, callback=None, help=summary)
        self._path = path

    def make_context(self, *args: Any, **options: Any) -> Any:
        return self.load().make_context(*args, **options)

    def load(self) -> Any:
        return typer_command(self.name or "", load_on_demand(f"rollbook.commands.{self._path}"), summary=self.help)


class LazyGroup(TyperGroup):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        for name, (path, summary) in COMMANDS.items():
            self.add_command(LazyCommand(name, path, summary))


app = typer_app(
    "Asynchronous reinforcement learning for LLM agents: no rollout is lost, trained twice, or left unexplained.",
    cls=LazyGroup,
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
    """Run a command. Rollbook's own errors and faults of the machine are printed as messages; any other exception is a bug."""
    try:
        app()
    except RollbookError as error:
        load_on_demand("rollbook.commands.output").print_error(str(error))
        sys.exit(2 if isinstance(error, UsageError) else 1)
    except OSError as error:
        if (fault := machine_fault(error)) is None:
            raise
        # Without the console, whose modules may not be loaded: perhaps no more files can be opened.
        sys.stderr.write(f"error: {fault}\n")
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
