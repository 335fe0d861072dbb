"""`rollbook tasks check`: reads tasks as a run would; with `--oracle` also plays the reference solution and an empty one."""

import asyncio
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from rollbook.commands.arguments import Argument, Option
from rollbook.commands.output import EXIT_FAILED, result, result_json, say
from rollbook.contracts.errors import RollbookError, UsageError
from rollbook.envs.builtin.code import Code
from rollbook.envs.builtin.code_tasks import tasks as code_tasks
from rollbook.envs.builtin.shell import SUBMIT, Files, file_tasks
from rollbook.sandbox.harbor.image import ANY, HOST, root_of
from rollbook.sandbox.harbor.task import HarborTask, find_tasks, read_task
from rollbook.sandbox.harbor.trial import open_trial
from rollbook.tasks.config import HARBOR_PREFIX

SHOWN_NAMES = 3
"""Tasks that are named for a fault that several have."""
SHOWN_CHARS = 400
"""Of what the reference solution and the tests printed."""
GENERATED = {"code": lambda: list(code_tasks()), "files": lambda: list(file_tasks())}


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskCheck:
    """`solved` and `empty` are the rewards of the reference solution and of doing nothing; None: not played, or not scored."""

    name: str
    fault: str | None = None
    solved: float | None = None
    empty: float | None = None


async def check_tasks(
    source: str, *, is_oracle: bool, images: Mapping[str, str] | None = None, jobs: int = 2
) -> list[TaskCheck]:
    """Check all tasks of a directory in Harbor's format, or the generated ones of `code` or `files`."""
    free = asyncio.Semaphore(jobs)
    with tempfile.TemporaryDirectory(prefix="rollbook-images-") as cache:

        async def check(task: Path | Mapping[str, Any]) -> TaskCheck:
            async with free:
                if isinstance(task, Path):
                    return await _check_harbor(task, is_oracle=is_oracle, images=images or {}, cache=Path(cache))
                return await _check_generated(source, task, is_oracle=is_oracle)

        tasks: Sequence[Path | Mapping[str, Any]]
        tasks = GENERATED[source]() if source in GENERATED else find_tasks(Path(source.removeprefix(HARBOR_PREFIX)))
        return list(await asyncio.gather(*map(check, tasks)))


async def _check_harbor(directory: Path, *, is_oracle: bool, images: Mapping[str, str], cache: Path) -> TaskCheck:
    name = directory.name
    try:
        task = read_task(directory.resolve())
        root_of(task.recipe.base, images)
        if not is_oracle:
            return TaskCheck(name=name)
        if task.solution is None:
            return TaskCheck(name=name, fault="it has no solution/solve.sh, so it cannot be checked with --oracle")
        empty, _ = await _play(task, images, cache, is_solved=False)
        solved, account = await _play(task, images, cache, is_solved=True)
        return _verdict(name, solved, empty, account)
    except RollbookError as error:
        return TaskCheck(name=name, fault=str(error))


async def _play(task: HarborTask, images: Mapping[str, str], cache: Path, *, is_solved: bool) -> tuple[float, str]:
    """The reward, and what happened."""
    account = ""
    async with open_trial(task, images=images, cache=cache) as trial:
        if is_solved:
            solution = await trial.solve()
            if solution.is_timed_out:
                account = f"; it was ended after {task.agent_timeout_s:g} s (agent.timeout_sec)"
            elif not solution.is_ok:
                account = f"; it ended with code {solution.exit_code}: {solution.text[-SHOWN_CHARS:].strip()}"
        verdict = await trial.verify()
        said = verdict.output[-SHOWN_CHARS:].strip()
        return verdict.reward, account + (f"; the tests: {said}" if said else "")


async def _check_generated(source: str, task: Mapping[str, Any], *, is_oracle: bool) -> TaskCheck:
    name = str(task["id"])
    if not is_oracle:
        return TaskCheck(name=name)
    solution = [Code.oracle(task)] if source == "code" else Files.oracle(task)
    nothing = [f"```python\n{task['start']}```"] if source == "code" else [SUBMIT]
    try:
        solved, empty = [await _reward_of(source, task, actions) for actions in (solution, nothing)]
    except RollbookError as error:
        return TaskCheck(name=name, fault=str(error))
    return _verdict(name, solved, empty, "")


async def _reward_of(source: str, task: Mapping[str, Any], actions: Sequence[str]) -> float:
    environment = Code() if source == "code" else Files()
    try:
        await environment.reset(task)
        for action in actions:
            observation = await environment.step(action)
            if observation.done:
                break
        return observation.reward
    finally:
        await environment.close()


def _verdict(name: str, solved: float, empty: float, account: str) -> TaskCheck:
    fault = None
    if solved != 1.0:
        fault = f"the reference solution gets {solved:g}, and must get 1{account}"
    elif empty != 0.0:
        fault = f"doing nothing gets {empty:g}, and must get 0"
    return TaskCheck(name=name, fault=fault, solved=solved, empty=empty)


def check_command(
    source: Annotated[str, Argument(help="A directory of Harbor tasks (DIR or harbor:DIR), or `code` or `files`.")],
    oracle: Annotated[
        bool, Option("--oracle", help="Play each reference solution, which must get 1, and nothing, which must get 0.")
    ] = False,
    image: Annotated[
        list[str] | None,
        Option(
            "--image",
            metavar="NAME=DIRECTORY",
            help=f"The local root of a base image, or `{HOST}`: programs of this machine; `{ANY}` stands for all others. "
            "May be repeated.",
        ),
    ] = None,
    jobs: Annotated[int, Option("--jobs", min=1, help="Tasks that are played at the same time.")] = 2,
    as_json: Annotated[bool, Option("--json", help="Print the findings as one JSON line.")] = False,
) -> int:
    """Read tasks as a run would, and report every fault; exit code 1 if there is one."""
    roots = {}
    for one in image or ():
        name, _, directory = one.partition("=")
        if directory != HOST and (not directory or not Path(directory).is_dir()):
            raise UsageError(f"--image {one}: it must be NAME=DIRECTORY, and the directory must exist, or NAME={HOST}")
        roots[name] = directory
    checks = asyncio.run(check_tasks(source, is_oracle=oracle, images=roots, jobs=jobs))
    faults = [check for check in checks if check.fault is not None]
    if as_json:
        result_json(
            {"tasks": len(checks), "oracle": oracle, "faults": {check.name: check.fault for check in faults}},
        )
    else:
        alike: dict[str | None, list[str]] = defaultdict(list)
        for check in faults:
            alike[check.fault].append(check.name)
        for fault, names in alike.items():
            result(f"{_list(names)}: {fault}")
        played = ": each reference solution gets 1, doing nothing gets 0" if oracle and not faults else ""
        say(f"{len(checks)} {'task' if len(checks) == 1 else 'tasks'}, {len(faults) or 'none'} with faults{played}")
    return EXIT_FAILED if faults else 0


def _list(names: Sequence[str]) -> str:
    rest = len(names) - SHOWN_NAMES
    return ", ".join(names[:SHOWN_NAMES]) + (f" and {rest} more" if rest > 0 else "")


COMMANDS = {"check": check_command}
