"""Reads a task directory in Harbor's format.

NAME/task.toml            limits and time-outs, versions 1.0 to 1.4 of the format
     instruction.md       what the agent is asked to do
     environment/         Dockerfile and the files that it copies
     tests/test.sh        the verifier: writes /logs/verifier/reward.txt or reward.json
     solution/solve.sh    the reference solution, optional
"""

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from rollbook.contracts.errors import RunError
from rollbook.sandbox.harbor.dockerfile import ImageRecipe, read_dockerfile
from rollbook.sandbox.sandbox import Limits

VERSIONS = ("1.0", "1.1", "1.2", "1.3", "1.4")
MAX_DISK_MB = 2048
"""Files of a sandbox are in memory, and tasks often state the disk of a whole machine."""
T = TypeVar("T")


class HarborTaskError(RunError):
    """A task directory that is incomplete, or that a sandbox cannot play."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HarborTask:
    name: str
    directory: Path
    instruction: str
    recipe: ImageRecipe
    limits: Limits
    agent_timeout_s: float
    verifier_timeout_s: float
    build_timeout_s: float
    env: Mapping[str, str] = field(default_factory=dict)
    verifier_env: Mapping[str, str] = field(default_factory=dict)
    solution_env: Mapping[str, str] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @property
    def solution(self) -> Path | None:
        path = self.directory / "solution" / "solve.sh"
        return path if path.is_file() else None


def find_tasks(root: Path) -> list[Path]:
    """The task directories below `root`, by name; `root` itself if it is one. Includes those that have only some of the files of a
    task: reading one names what is missing."""
    if (root / "task.toml").is_file():
        return [root]
    found: set[Path] = set()
    for depth in ("*", "*/*"):
        if any(root.glob(f"{depth}/task.toml")):
            found = {path.parent for name in ("task.toml", "instruction.md") for path in root.glob(f"{depth}/{name}")}
            break
    if not found:
        problem = "no directory in it has a task.toml" if root.is_dir() else "it is not a directory"
        raise HarborTaskError(f"{root} has no Harbor tasks: {problem}")
    return sorted(found)


def read_task(directory: Path) -> HarborTask:
    """Raises `HarborTaskError` or `DockerfileError` with what is missing, wrong or not supported."""
    path = directory / "task.toml"
    settings = _read_toml(path)
    version = str(settings.get("schema_version", settings.get("version", VERSIONS[0])))
    if version not in VERSIONS:
        raise HarborTaskError(f"{path}: version {version} is not known; known are {', '.join(VERSIONS)}")
    environment, verifier = (_table(settings, name, path) for name in ("environment", "verifier"))
    agent, solution = (_table(settings, name, path) for name in ("agent", "solution"))
    _refuse_unsupported(settings, environment, verifier, path)
    instruction = _read(directory / "instruction.md").strip()
    if not instruction:
        raise HarborTaskError(f"{directory / 'instruction.md'} is empty; it must say what the agent is asked to do")
    if not (directory / "tests" / "test.sh").is_file():
        raise HarborTaskError(f"{directory}: tests/test.sh is missing; it must write the reward")
    agent_s = _value(agent, "timeout_sec", float, 600.0, path)
    verifier_s = _value(verifier, "timeout_sec", float, 600.0, path)
    cpus = _value(environment, "cpus", float, 1.0, path)
    limits = Limits(
        memory_mb=_megabytes(environment, "memory", 2048, path),
        disk_mb=min(MAX_DISK_MB, _megabytes(environment, "storage", MAX_DISK_MB, path)),
        cpu_s=max(1.0, cpus) * (agent_s + verifier_s),
        wall_s=agent_s + verifier_s + 60.0,
    )
    return HarborTask(
        name=directory.name,
        directory=directory,
        instruction=instruction,
        recipe=_recipe(directory, environment, path),
        limits=limits,
        agent_timeout_s=agent_s,
        verifier_timeout_s=verifier_s,
        build_timeout_s=_value(environment, "build_timeout_sec", float, 600.0, path),
        env=_variables(environment, path),
        verifier_env=_variables(verifier, path),
        solution_env=_variables(solution, path),
        metadata=_table(settings, "metadata", path),
    )


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise HarborTaskError(f"{path.parent}: {path.name} is missing") from error
    except (OSError, UnicodeDecodeError) as error:
        raise HarborTaskError(f"{path}: {error}") from error


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(_read(path))
    except tomllib.TOMLDecodeError as error:
        raise HarborTaskError(f"{path}: {error}") from error


def _recipe(directory: Path, environment: Mapping[str, Any], path: Path) -> ImageRecipe:
    dockerfile = directory / "environment" / "Dockerfile"
    if dockerfile.is_file():
        recipe = read_dockerfile(_read(dockerfile), name=str(dockerfile))
    elif "docker_image" in environment:
        recipe = ImageRecipe(base=_value(environment, "docker_image", str, "", path), workdir="/app")
    else:
        raise HarborTaskError(f"{directory}: environment/Dockerfile is missing")
    recipe.workdir = _value(environment, "workdir", str, recipe.workdir, path)
    return recipe


def _refuse_unsupported(
    settings: Mapping[str, Any], environment: Mapping[str, Any], verifier: Mapping[str, Any], path: Path
) -> None:
    reasons = {
        "steps": bool(settings.get("steps")),
        "environment.gpus": bool(environment.get("gpus")),
        "environment.mcp_servers": bool(environment.get("mcp_servers")),
        "environment.os": environment.get("os", "linux") != "linux",
        "verifier.environment_mode": verifier.get("environment_mode", "shared") != "shared",
        "environment/docker-compose.yaml": (path.parent / "environment" / "docker-compose.yaml").exists(),
    }
    found = [name for name, is_used in reasons.items() if is_used]
    if found:
        raise HarborTaskError(f"{path}: {', '.join(found)} cannot be played in a sandbox; it needs a container engine")


def _table(settings: Mapping[str, Any], name: str, path: Path) -> Mapping[str, Any]:
    value = settings.get(name, {})
    if not isinstance(value, Mapping):
        raise HarborTaskError(f"{path}: {name} must be a table")
    return value


def _value(table: Mapping[str, Any], name: str, kind: type[T], default: T, path: Path) -> T:
    value = table.get(name)
    if value is None:
        return default
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if not isinstance(value, kind) or (isinstance(value, float) and not 0 < value < math.inf):
        raise HarborTaskError(
            f"{path}: {name} = {value!r} must be a {'finite number above 0' if kind is float else 'string'}"
        )
    return value


def _megabytes(environment: Mapping[str, Any], name: str, default: int, path: Path) -> int:
    """`memory_mb = 2048`, or the older `memory = "2G"`."""
    number = environment.get(f"{name}_mb")
    if isinstance(number, int) and number > 0:
        return number
    text = str(environment.get(name, "")).strip().upper().removesuffix("B").removesuffix("I")
    if number is None and not text:
        return default
    scale = {"K": 1 / 1024, "M": 1, "G": 1024, "T": 1024 * 1024}.get(text[-1:], 0)
    try:
        size = int(float(text[:-1]) * scale)
    except (ValueError, OverflowError):
        size = 0
    if size < 1:
        raise HarborTaskError(f"{path}: {name}_mb must be a whole number, or {name} a size such as '2G'")
    return size


def _variables(table: Mapping[str, Any], path: Path) -> dict[str, str]:
    variables = table.get("env", {})
    if not isinstance(variables, Mapping) or not all(isinstance(value, str) for value in variables.values()):
        raise HarborTaskError(f"{path}: env must be a table of strings")
    return dict(variables)
