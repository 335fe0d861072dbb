"""`rollbook act`: pause, drain, checkpoint, quarantine and notes, recorded in the ledger of the run."""

import asyncio
import getpass
from dataclasses import asdict
from typing import Annotated

from rollbook.commands.arguments import Argument, AsJson, Option, RunOrLedger
from rollbook.commands.output import result_json, say
from rollbook.contracts.admission import ActionKind
from rollbook.contracts.errors import UsageError
from rollbook.run.actions import act

BY_PERSONS = [kind.value for kind in ActionKind if kind is not ActionKind.DRAINED]


def act_command(  # noqa: PLR0917 - a command line is a list of flags
    run: RunOrLedger,
    kind: Annotated[str, Argument(metavar="|".join(BY_PERSONS), help="What to do.")],
    target: Annotated[str, Argument(help="The task of quarantine and readmit, the group of annotate.")] = "",
    note: Annotated[str, Option("--note", help="Why, for the others. The text of annotate.")] = "",
    sample: Annotated[int | None, Option("--sample", min=0, help="annotate: one sample of the group, from 0.")] = None,
    author: Annotated[str | None, Option("--author", help="Default: your user name.")] = None,
    as_json: AsJson = False,
) -> None:
    """Act on a run. Each action is recorded with its author and time, and the dashboard shows it.

    pause: no group starts until resume. drain: what was started finishes, then the run stops with a checkpoint; `rollbook train`
    continues it. checkpoint: the trainer writes one now. quarantine: a task is not trained until readmit. annotate: a note about a
    group. A ledger at a URL needs the token of an operator or the trainer in ROLLBOOK_OPERATOR_TOKENS.
    """
    if kind not in BY_PERSONS:
        raise UsageError(f"{kind!r} is not one of {', '.join(BY_PERSONS)}")
    if kind == ActionKind.ANNOTATE and not target:
        raise UsageError("annotate needs the id of a group")
    done = asyncio.run(
        act(run, ActionKind(kind), author=author or getpass.getuser(), target=target, sample=sample, note=note)
    )
    if as_json:
        result_json(asdict(done))
    else:
        about = f" {done.target}" if done.target else ""
        say(f"action {done.number}: {done.kind}{about}, by {done.author}")
