"""Environments with a shell in a sandbox: `files` (the files must be as expected) and `harbor` (tasks in Harbor's format).

Each turn the agent sends one command, in a fenced block or as the last line, and sees its output. The episode ends when the files
are as expected (`files`), when the agent sends `submit`, or after `max_turns` commands. Commands that exceed a limit of the sandbox
end the episode with reward 0; a failure of the machine makes it unscorable.
"""

import math
import random
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

from rollbook.contracts.task import Observation
from rollbook.envs.builtin.terminal.environment import TASKS, command_of
from rollbook.envs.sandboxes.warm import OpenSandbox
from rollbook.sandbox.bubblewrap import Kind, open_sandbox
from rollbook.sandbox.harbor.image import DEFAULT_CACHE
from rollbook.sandbox.harbor.task import read_task
from rollbook.sandbox.harbor.trial import Trial, open_trial
from rollbook.sandbox.sandbox import Limits, Sandbox, SandboxLimitError

SUBMIT = "submit"
MAX_OUTPUT_CHARS = 4_000
MAX_OUTPUT_BYTES = 1 << 16
FILES_LIMITS = Limits(memory_mb=512, cpu_s=120, processes=64, disk_mb=64, files=20_000)


class Shell(ABC):
    """What both environments share. A subclass opens the sandbox and computes the reward."""

    last_action: str | None = None
    """See `Observation`."""

    def __init__(self, *, max_turns: int, command_s: float) -> None:
        if max_turns < 1:
            raise ValueError(f"max_turns is {max_turns}; a task needs at least one command")
        self._max_turns = max_turns
        self._command_s = command_s
        self._resources = AsyncExitStack()
        self._sandbox: Sandbox | None = None
        self._commands: list[str] = []
        self._left_s = math.inf
        """Time that is left for commands. The policy's own time does not count."""

    async def step(self, action: str) -> Observation:
        if self._sandbox is None:
            raise RuntimeError("step without a task: reset first")
        command = command_of(action)
        self._commands.append(command)
        is_last = command == SUBMIT or len(self._commands) >= self._max_turns
        output = "(submitted)"
        try:
            if command != SUBMIT:
                output = await self._run(command)
                is_last = is_last or self._left_s <= 0
            reward = await self._reward(is_last=is_last)
        except SandboxLimitError as error:
            output, reward, is_last = f"The sandbox ended: {error}", 0.0, True
        done = is_last or reward >= 1.0
        facts = {"commands": list(self._commands), "sandbox": dict(self._sandbox.facts)}
        if done:
            await self.close()
        return Observation(
            text=output,
            reward=reward,
            done=done,
            solved=reward >= 1.0 if done else None,
            facts=facts,
            last_action=None if done else self.last_action,
        )

    async def close(self) -> None:
        self._sandbox = None
        await self._resources.aclose()

    async def _run(self, command: str) -> str:
        assert self._sandbox is not None
        timeout_s, began = min(self._command_s, self._left_s), time.monotonic()
        result = await self._sandbox.exec(command, timeout_s=timeout_s, output_bytes=MAX_OUTPUT_BYTES)
        self._left_s -= time.monotonic() - began
        text = result.text
        if len(text) > MAX_OUTPUT_CHARS:
            text = f"{text[:MAX_OUTPUT_CHARS]}\n… {len(text) + result.dropped_bytes - MAX_OUTPUT_CHARS} more characters"
        if result.is_timed_out:
            return f"{text}\n(killed after {timeout_s:.3g} s)"
        return text + (f"(exit code {result.exit_code})" if result.exit_code else "") or "(no output)"

    @abstractmethod
    async def _reward(self, *, is_last: bool) -> float: ...


class Files(Shell):
    """Tasks like those of `terminal` (`goal`, `files`, `expect`), on a real file system with a real shell."""

    warm_limits = FILES_LIMITS

    def __init__(self, *, max_turns: int = 12, command_s: float = 10.0, sandbox: Kind = "bubblewrap") -> None:
        super().__init__(max_turns=max_turns, command_s=command_s)
        self.open_sandbox: OpenSandbox = partial(open_sandbox, limits=FILES_LIMITS, kind=sandbox)
        self._expect: dict[str, str | None] = {}

    async def reset(self, task: Mapping[str, Any]) -> Observation:
        missing = [name for name in ("goal", "expect") if name not in task]
        if missing:
            raise ValueError(f"the task lacks {', '.join(missing)}; it needs goal, expect and, optionally, files")
        await self.close()
        self._commands, self._expect = [], dict(task["expect"])
        self._sandbox = await self._resources.enter_async_context(self.open_sandbox())
        for path, text in dict(task.get("files", {})).items():
            await self._sandbox.write(path, text.encode())
        if await self._is_solved():
            raise ValueError("the task is solved at the start; doing nothing must not be rewarded")
        return Observation(text=f"{task['goal']}\nOne shell command a turn. Send {SUBMIT} when you are done.")

    async def _reward(self, *, is_last: bool) -> float:
        return float(await self._is_solved())

    async def _is_solved(self) -> bool:
        """The files are read by the host; nothing in the sandbox is asked."""
        assert self._sandbox is not None
        for path, text in self._expect.items():
            try:
                found: str | None = (await self._sandbox.read(path, max_bytes=1 << 20)).decode(errors="replace")
            except FileNotFoundError:
                found = None
            except OSError:
                return False
            if found != text:
                return False
        return True

    @staticmethod
    def oracle(task: Mapping[str, Any]) -> list[str]:
        """The actions that solve a task."""
        return list(task["solution"])

    @staticmethod
    def example_tasks() -> list[dict[str, Any]]:
        """Tasks for the playground."""
        return [{name: value for name, value in row.items() if name != "solution"} for row in TASKS]


class Harbor(Shell):
    """Tasks of `tasks.source = "harbor:DIR"`. The verifier runs once: after the last command, when the commands have run for
    `agent.timeout_sec` of the task, or when a limit of `[rollout]` ends the episode.

    `images`: local roots of base images, by name, or `host`: programs of this machine; `*` stands for all that are not named.
    `network`: share the network of this machine with the agent's commands.
    """

    last_action = SUBMIT

    def __init__(
        self,
        *,
        max_turns: int = 30,
        command_s: float = 60.0,
        images: Mapping[str, str] | None = None,
        cache: str | None = None,
        network: bool = False,
        sandbox: Kind = "bubblewrap",
    ) -> None:
        super().__init__(max_turns=max_turns, command_s=command_s)
        self._images = dict(images or {})
        self._cache = DEFAULT_CACHE if cache is None else Path(cache)
        self._network = network
        self._kind = sandbox
        self._trial: Trial | None = None

    async def reset(self, task: Mapping[str, Any]) -> Observation:
        if "path" not in task:
            raise ValueError('the task lacks path; set tasks.source = "harbor:DIR"')
        await self.close()
        self._commands = []
        trial = open_trial(
            read_task(Path(task["path"])),
            images=self._images,
            cache=self._cache,
            network=self._network,
            kind=self._kind,
        )
        self._trial = await self._resources.enter_async_context(trial)
        self._sandbox = self._trial.sandbox
        self._left_s = self._trial.task.agent_timeout_s
        return Observation(
            text=f"{self._trial.task.instruction}\nOne shell command a turn. Send {SUBMIT} when you are done.",
            last_action=self.last_action,
        )

    async def _reward(self, *, is_last: bool) -> float:
        assert self._trial is not None
        return (await self._trial.verify()).reward if is_last else 0.0


def file_tasks(*, count: int = 60, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Generated tasks of `files` in five tiers, each with a solution: `tasks.source = "rollbook.envs.builtin.shell:file_tasks"`."""
    for number in range(count):
        rng = random.Random(f"{seed}/{number}")
        tier, make = FILE_FAMILIES[number % len(FILE_FAMILIES)]
        yield {"id": f"files-{make.__name__.strip('_')}-{number}", "tier": tier, **make(rng)}


def _lines(values: Sequence[object]) -> str:
    return "".join(f"{value}\n" for value in values)


def _write(rng: random.Random) -> dict[str, Any]:
    word, name = rng.choice(NAMES), rng.choice(("note", "greeting", "label"))
    return {
        "goal": f"Write the word {word} into the file {name}.txt.",
        "files": {},
        "expect": {f"{name}.txt": f"{word}\n"},
        "solution": [f"echo {word} > {name}.txt"],
    }


def _rename(rng: random.Random) -> dict[str, Any]:
    old, new = rng.sample(NAMES, 2)
    return {
        "goal": f"Rename {old}.txt to {new}.md.",
        "files": {f"{old}.txt": f"{old}\n"},
        "expect": {f"{old}.txt": None, f"{new}.md": f"{old}\n"},
        "solution": [f"mv {old}.txt {new}.md"],
    }


def _select(rng: random.Random) -> dict[str, Any]:
    level = rng.choice(("ERROR", "WARN"))
    log = [
        "INFO up",
        *(f"{rng.choice(('ERROR', 'WARN', 'INFO'))} {rng.choice(NAMES)}" for _ in range(8)),
        f"{level} end",
    ]
    return {
        "goal": f"Collect every line of app.log that starts with {level} in found.txt, in their order.",
        "files": {"app.log": _lines(log)},
        "expect": {"found.txt": _lines([line for line in log if line.startswith(level)])},
        "solution": [f"grep ^{level} app.log > found.txt"],
    }


def _distinct(rng: random.Random) -> dict[str, Any]:
    names = [rng.choice(NAMES) for _ in range(rng.randint(5, 20))]
    return {
        "goal": "Write how many different lines names.txt has into count.txt, only the number.",
        "files": {"names.txt": _lines(names)},
        "expect": {"count.txt": f"{len(set(names))}\n"},
        "solution": ["sort -u names.txt | wc -l > count.txt"],
    }


def _tidy(rng: random.Random) -> dict[str, Any]:
    names, year = rng.sample(NAMES, 3), rng.randint(2001, 2030)
    return {
        "goal": f"Move every .txt file of the folder inbox into archive/{year} and remove inbox.",
        "files": {f"inbox/{name}.txt": f"{name}\n" for name in names},
        "expect": {"inbox": None, **{f"archive/{year}/{name}.txt": f"{name}\n" for name in names}},
        "solution": [f"mkdir -p archive/{year}", f"mv inbox/*.txt archive/{year}", "rm -r inbox"],
    }


def _replace(rng: random.Random) -> dict[str, Any]:
    old, new = rng.sample(NAMES, 2)
    text = _lines([f"{rng.choice((old, 'other'))} {number}" for number in range(6)] + [old])
    return {
        "goal": f"Replace every {old} by {new} in conf/settings.txt.",
        "files": {"conf/settings.txt": text},
        "expect": {"conf/settings.txt": text.replace(old, new)},
        "solution": [f"sed -i s/{old}/{new}/g conf/settings.txt"],
    }


def _column(rng: random.Random) -> dict[str, Any]:
    rows = [(rng.choice(NAMES), rng.randint(1, 90)) for _ in range(rng.randint(4, 12))]
    return {
        "goal": "Write the sum of the second column of sales.csv, whose first line names the columns, into total.txt.",
        "files": {"sales.csv": "name,amount\n" + _lines([f"{name},{amount}" for name, amount in rows])},
        "expect": {"total.txt": f"{sum(amount for _, amount in rows)}\n"},
        "solution": ["awk -F, 'NR > 1 {sum += $2} END {print sum}' sales.csv > total.txt"],
    }


def _search(rng: random.Random) -> dict[str, Any]:
    word, *names = rng.sample(NAMES, 6)
    files = {f"tree/{name}/{index}.txt": f"{rng.choice((word, 'nothing'))}\n" for index, name in enumerate(names)}
    files[f"tree/{names[0]}/last.txt"] = f"{word}\n"
    found = sorted(path for path, text in files.items() if text == f"{word}\n")
    return {
        "goal": f"Write the paths of all files below tree that contain the word {word} into found.txt, sorted, one a line.",
        "files": files,
        "expect": {"found.txt": _lines(found)},
        "solution": [f"grep -rl {word} tree | LC_ALL=C sort > found.txt"],
    }


def _largest(rng: random.Random) -> dict[str, Any]:
    numbers, most = rng.sample(range(1, 900), 12), rng.randint(2, 4)
    return {
        "goal": f"Write the {most} largest numbers of data/numbers.txt, largest first, into top.txt.",
        "files": {"data/numbers.txt": _lines(numbers)},
        "expect": {"top.txt": _lines(sorted(numbers, reverse=True)[:most])},
        "solution": [f"sort -rn data/numbers.txt | head -n {most} > top.txt"],
    }


def _join(rng: random.Random) -> dict[str, Any]:
    names = sorted(rng.sample(NAMES, 6))
    ages = {name: rng.randint(20, 80) for name in names}
    towns = {name: rng.choice(("Oslo", "Rome", "Bonn")) for name in rng.sample(names, 4)}
    both = [f"{name} {ages[name]} {towns[name]}" for name in names if name in towns]
    return {
        "goal": "ages.txt and towns.txt have a name and a value in each line. Write name, age and town of all names that are in "
        "both into both.txt, separated by blanks and sorted by name.",
        "files": {
            "ages.txt": _lines([f"{name} {age}" for name, age in ages.items()]),
            "towns.txt": _lines([f"{name} {town}" for name, town in towns.items()]),
        },
        "expect": {"both.txt": _lines(both)},
        "solution": ["sort ages.txt > a; sort towns.txt > t", "join a t > both.txt", "rm a t"],
    }


NAMES = ("amber", "birch", "cedar", "delta", "ember", "fjord", "grove", "heath", "islet", "jetty", "knoll", "lagoon")
FILE_FAMILIES: tuple[tuple[int, Callable[[random.Random], dict[str, Any]]], ...] = (
    (1, _write),
    (1, _rename),
    (2, _select),
    (2, _distinct),
    (3, _tidy),
    (3, _replace),
    (4, _column),
    (4, _largest),
    (5, _search),
    (5, _join),
)
