"""`rollbook scale`: change the number of additional policy servers and dispatchers of a run that is running."""

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

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
