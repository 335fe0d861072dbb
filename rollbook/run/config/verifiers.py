"""Runs with `env.name = "verifiers:NAME"`: the taskset brings its tasks, and a rollout function of its own plays them.

The sections `tasks` and `rollout` of the resolved configuration then name what is used; the section `env` is not needed.
"""

import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from rollbook.contracts.errors import RunError
from rollbook.envs.config import VERIFIERS_PREFIX
from rollbook.rollout.config import RolloutConfig
from rollbook.rollout.verifiers.process import require_python

FUNCTION = "verifiers"
ROWS = "rollbook.rollout.verifiers.process:rows"


def with_verifiers(table: dict[str, Any], source_dir: Path) -> dict[str, Any]:
    """The table with tasks and rollout function of the taskset, if `env` names one."""
    if isinstance(short := table.get("env"), str):
        table = {**table, "env": {"name": short}}
    tasks, rollout, env = (table.get(section, {}) for section in ("tasks", "rollout", "env"))
    if not all(isinstance(section, Mapping) for section in (tasks, rollout, env)):
        return table
    name, settings = env.get("name"), rollout.get("settings", {})
    is_taskset = isinstance(name, str) and name.startswith(VERIFIERS_PREFIX)
    is_allowed = not env.keys() - {"name", "args", "python"} and rollout.get("function", FUNCTION) == FUNCTION
    if not is_taskset or not is_allowed or not isinstance(settings, Mapping):
        return table  # the section `env` reports what is wrong
    where = {"taskset": name.removeprefix(VERIFIERS_PREFIX), "args": env.get("args", {})}
    if isinstance(python := env.get("python", settings.get("python")), str):
        # Not resolved: the link to the interpreter is what makes it that of the virtual environment.
        where["python"] = str(source_dir / python) if os.sep in python else shutil.which(python) or python
    source = {"source": ROWS, "args": {**where, **({"limit": tasks["limit"]} if "limit" in tasks else {})}}
    return {
        **{section: value for section, value in table.items() if section != "env"},
        "tasks": tasks if "source" in tasks else {**tasks, **source},
        "rollout": {"function": FUNCTION, **rollout, "settings": {**settings, **where}},
    }


def missing_interpreter(parts: Mapping[str, BaseModel]) -> Iterator[tuple[str, str]]:
    """Faults of the settings that need no import of verifiers."""
    rollout = parts.get("rollout")
    if not isinstance(rollout, RolloutConfig) or rollout.function != FUNCTION:
        return
    python = rollout.settings.get("python")
    try:
        require_python(python if isinstance(python, str) else "")
    except RunError as error:
        yield "env.python", str(error).removeprefix("env.python").removeprefix(" =").strip()
    each = rollout.settings.get("samples_per_episode", 1)
    if isinstance(each, int) and each > 0 and rollout.completions_per_prompt % each:
        yield (
            "rollout.completions_per_prompt",
            f"{rollout.completions_per_prompt} is not a multiple of rollout.settings.samples_per_episode = {each}, so an episode "
            "would have samples without a group",
        )
