"""The verbs, global flags and exit codes: 0 done, 1 failed, 2 wrong usage or config, 130 interrupted.

Messages go to stderr, results to stdout; `--json` prints results as JSON.
"""

import sys
from pathlib import Path
from typing import Annotated

import typer

from rollbook import __version__
from rollbook.cli.audit import audit
from rollbook.cli.config import config_app
from rollbook.cli.demo import demo
from rollbook.cli.env import env_app
from rollbook.cli.eval import eval_command
from rollbook.cli.explain import explain
from rollbook.cli.host import host
from rollbook.cli.inspect import inspect
from rollbook.cli.ledger import ledger_app
from rollbook.cli.models import models_app
from rollbook.cli.output import EXIT_USAGE, print_error
from rollbook.cli.policy import policy_app
from rollbook.cli.proxy import proxy
from rollbook.cli.replay import replay
from rollbook.cli.sft import sft
from rollbook.cli.tokens import tokens_app
from rollbook.cli.train import train
from rollbook.contracts.errors import RollbookError
from rollbook.contracts.plugin import extend_search_path
from rollbook.run.config.run import ConfigError
from rollbook.run.directory import RunDirectoryError

app = typer.Typer(
    name="rollbook",
    help="Asynchronous reinforcement learning for LLM agents: no rollout is lost, trained twice, or left unexplained.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
app.command()(train)
app.command()(sft)
app.command("eval")(eval_command)
app.command()(audit)
app.command()(inspect)
app.command()(explain)
app.command()(replay)
app.command()(demo)
app.command()(host)
app.command()(proxy)
app.add_typer(config_app, name="config")
app.add_typer(env_app, name="env")
app.add_typer(ledger_app, name="ledger")
app.add_typer(tokens_app, name="tokens")
app.add_typer(models_app, name="models")
app.add_typer(policy_app, name="policy")


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
    """Run a verb. Rollbook's own errors are printed as messages; any other exception is a bug and shows its traceback."""
    try:
        app()
    except (ConfigError, RunDirectoryError) as error:
        print_error(str(error))
        sys.exit(EXIT_USAGE)
    except RollbookError as error:
        print_error(str(error))
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
