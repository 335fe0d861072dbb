"""How commands describe their arguments, without the command-line library, and the arguments that several of them share.

A command is a function. Each parameter is annotated with an `Argument` or an `Option`; the first paragraph of the docstring is the
summary of its help. The function returns the exit code, or None for 0. `cli/translation.py` makes commands of typer from it, so
importing a command from Python needs no typer.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated


@dataclass(frozen=True, slots=True, kw_only=True)
class Argument:
    """A positional argument."""

    help: str
    metavar: str | None = None


@dataclass(frozen=True, slots=True)
class Option:
    """An option: `--jobs`, or `--greedy/--sampled` for a choice of two."""

    flag: str
    short: str | None = None
    help: str | None = None
    metavar: str | None = None
    min: float | None = None
    max: float | None = None
    variable: str | None = None
    """An environment variable that is read if the option is absent."""
    is_hidden: bool = False
    settings: str | None = None
    """The model of the settings that the option overrides: an unknown option with the name of a setting is answered with it."""


RunOrLedger = Annotated[
    str,
    Argument(help="A run directory, or the address of a ledger: http://HOST:PORT or http://HOST:PORT/v1/runs/RUN."),
]
Overrides = Annotated[
    list[str] | None,
    Option(
        "--set",
        metavar="SECTION.FIELD=VALUE",
        help="Override a field; may be repeated.",
        settings="rollbook.run.config.run:RunConfig",
    ),
]
AsJson = Annotated[bool, Option("--json", help="Print the result as one JSON line on stdout.")]
UsePreflight = Annotated[
    bool,
    Option(
        "--preflight/--no-preflight",
        help="Before the start: load the tasks, play one episode with a canned answer, and score it.",
    ),
]
AllowActions = Annotated[
    bool, Option("--allow-actions", help="Operators may act on the run from its page, with a token.")
]
Dashboard = Annotated[bool, Option("--dashboard/--no-dashboard", help="Serve the page of the run while it runs.")]
Port = Annotated[int, Option("--port", min=0, max=65535, help="0 lets the kernel choose a port.")]
ReadyFile = Annotated[Path | None, Option("--ready-file", help="Written with the address once the server is ready.")]
TokenFile = Annotated[
    Path | None,
    Option(
        "--token-file",
        help="File with the token for requests that steer the server; created if missing. Default on loopback: one file per user.",
    ),
]
AllowHost = Annotated[
    list[str] | None,
    Option("--allow-host", help="An additional name under which clients reach the server; may be repeated."),
]
AllowOrigin = Annotated[
    list[str] | None,
    Option("--allow-origin", help="An origin whose web pages may call the server; * allows all; may be repeated."),
]


def is_address(run: str) -> bool:
    return run.startswith(("http://", "https://"))
