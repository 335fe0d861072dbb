"""`rollbook scale`: change the number of additional policy servers and dispatchers of a run that is running."""

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from rollbook.commands.arguments import Argument, AsJson
from rollbook.commands.output import result_json, say
from rollbook.commands.training.join import running_addresses
from rollbook.contracts.errors import UsageError
from rollbook.run.config.run import load_resolved_config
from rollbook.run.directory import RunDirectory
from rollbook.run.supervision.scale import ROLES, Scale


def scale(run_dir: Path, requests: Sequence[str], *, say: Callable[[str], None]) -> dict[str, int]:
    """`requests` are like `policy=3`. Returns the requested numbers; the supervisor of the run starts and stops processes."""
    directory = RunDirectory(run_dir.resolve())
    config = load_resolved_config(directory).config
    running_addresses(directory)
    if not config.cluster.has_members:
        raise UsageError("this run cannot be scaled: start it with cluster.allow_join = true")
    scale = Scale.read(directory) or Scale()
    for request in requests:
        role, equals, number = request.partition("=")
        if role not in ROLES or not equals or not number.isdecimal():
            raise UsageError(
                f"{request!r} must look like policy=3, rollout=2 or env=1 (additional processes, 0 or more)"
            )
        scale = replace(scale, **{role: int(number)})
    if scale.rollout and config.tasks.is_posted:
        raise UsageError("this run has no dispatchers: its groups are posted by Atropos environments")
    if scale.env and config.env.pool_size is None:
        raise UsageError(
            "only a run with env.pool_size has environment servers; in this one, workers create environments"
        )
    scale.write(directory)
    running = Counter(name.split("-")[0] for name in _ready_extras(directory))
    for role in ROLES:
        say(f"{role}: {scale.of(role)} additional requested, {running[role]} ready now")
    return scale.as_dict()


def _ready_extras(directory: RunDirectory) -> list[str]:
    rows = json.loads(directory.processes_file.read_text(encoding="utf-8"))["processes"]
    return [name for name, row in rows.items() if "-extra-" in name and row["ready"]]


def scale_command(
    run: Annotated[Path, Argument(help="The run directory.")],
    requests: Annotated[list[str], Argument(metavar="ROLE=NUMBER...", help="policy=2 rollout=3 env=1")],
    as_json: AsJson = False,
) -> None:
    """Set the number of policy servers, dispatchers and environment servers in addition to those that the run started with.

    The supervisor of the run starts what is missing. It removes the newest ones first, when they have finished their work.
    """
    found = scale(run, requests, say=say)
    if as_json:
        result_json(found)
