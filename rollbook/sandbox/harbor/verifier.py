"""Runs the tests of a task on what an agent left: the agent can neither write its reward nor prevent that it gets 0.

Harbor's tests run in the sandbox of the agent and judge its files, so the system is checked first. The loader, the shell and the
programs of `/usr` are those of the image, files that they would read and the image does not have are taken away, and the search
path, the home and all processes are new. What an agent has ruined gets 0. What the machine has not done in time raises
`VerifierError`: the episode is played again.

Tests that import modules of the agent, or run its programs, trust these.
"""

import asyncio
import io
import json
import math
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rollbook.sandbox.harbor.image import tar_of
from rollbook.sandbox.harbor.task import HarborTask
from rollbook.sandbox.root import search_path
from rollbook.sandbox.sandbox import Image, Sandbox, SandboxError, SandboxLimitError, SandboxState

TESTS, LOGS, HOME = "/tests", "/logs/verifier", "/logs/home"
MAX_REWARD_BYTES = 1 << 20
SHOWN_CHARS = 2000
ROOM_BYTES, ROOM_FILES = 16 * 2**20, 1000
"""What tests need besides their own files, unless the image leaves less than twice as much."""
PLANTED = (
    # Of the loader. Before any program runs.
    *("/etc/ld.so.preload", "/etc/ld.so.cache", "/etc/ld-musl-x86_64.path", "/etc/ld-musl-aarch64.path"),
    # Of shells, interpreters and libraries.
    *("/etc/profile", "/etc/profile.d", "/etc/bash.bashrc", "/etc/environment", "/etc/inputrc", "/etc/gitconfig"),
    *(f"/etc/python3.{minor}" for minor in range(6, 20)),
    *("/etc/perl", "/etc/pip.conf", "/etc/npmrc", "/etc/ssl/openssl.cnf", "/etc/pki/tls/openssl.cnf"),
    # pytest and Node search for them in all directories above the tests.
    *(
        "/node_modules",
        "/package.json",
        "/conftest.py",
        "/pytest.ini",
        "/.pytest.ini",
        "/pyproject.toml",
        "/tox.ini",
        "/setup.cfg",
        "/setup.py",
    ),
)
"""Files that programs read as code or settings wherever they run. Those of the image are restored."""


class VerifierError(SandboxError):
    """The verifier gave no reward. The episode is not scored."""


class _RuinedError(Exception):
    """Tests cannot run on what the agent left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskVerdict:
    reward: float
    rewards: Mapping[str, float]
    """All values that the verifier wrote."""
    output: str
    """The end of what it printed, or why it was not run."""


async def verify(task: HarborTask, sandbox: Sandbox, image: Image, before: SandboxState) -> TaskVerdict:
    """`before`: the state of the sandbox in which the agent began."""
    try:
        env = await _prepare(task, sandbox, image, before)
        result = await sandbox.exec(["bash", f"{TESTS}/test.sh"], env=env, timeout_s=task.verifier_timeout_s)
    except _RuinedError as ruin:
        return _nothing(f"the tests could not run, and the agent is the cause: {ruin}")
    except SandboxLimitError as error:
        if error.limit == "wall_s":
            raise VerifierError(f"{task.name}: the sandbox ended while the verifier ran: {error}") from error
        return _nothing(f"the sandbox ended while the tests ran: {error}")
    output = result.text[-SHOWN_CHARS:]
    if result.is_timed_out:
        raise VerifierError(
            f"{task.name}: the verifier took longer than {task.verifier_timeout_s:g} s (verifier.timeout_sec): "
            f"{output[-400:] or 'it printed nothing'}"
        )
    rewards = await _read_rewards(task, sandbox, output, result.exit_code)
    return TaskVerdict(reward=_main_reward(rewards), rewards=rewards, output=output)


async def _prepare(task: HarborTask, sandbox: Sandbox, image: Image, before: SandboxState) -> dict[str, str]:
    """Returns the environment of the tests."""
    await sandbox.end_processes()
    tests = await asyncio.to_thread(tar_of, task.directory / "tests")
    state = await sandbox.inspect()
    _require_room(state, before, len(tests))
    try:
        # Python takes a directory with this file for a virtual environment, and imports what it names.
        settings = [f"{place.removesuffix('/bin')}/pyvenv.cfg" for place in state.read_only if place.endswith("/bin")]
        for path in (*PLANTED, *settings, TESTS):
            if not _is_below(path, state.read_only):
                await sandbox.discard(path)
        await _discard_logs(sandbox)
    except OSError as error:
        raise _RuinedError(f"{error.filename} cannot be removed: {error.strerror}") from error
    path = task.verifier_env.get("PATH") or search_path(image)
    env = {**task.verifier_env, "PATH": _trusted_first(path, state.read_only), "HOME": HOME}
    await _run(sandbox, env, ["find", "/dev/shm", "-mindepth", "1", "-delete"])
    own = b"" if image.layer is None else await asyncio.to_thread(_members, image.layer, PLANTED)
    if own:
        await _run(sandbox, env, ["tar", "-C", "/", "--no-same-owner", "-xpf", "-"], stdin=own)
    await _run(sandbox, env, ["mkdir", "-p", TESTS, LOGS, HOME, image.workdir])
    await _run(sandbox, env, ["tar", "-C", TESTS, "--no-same-owner", "-xf", "-"], stdin=tests)
    await _run(sandbox, env, ["true"], cwd=image.workdir)
    return env


def _require_room(state: SandboxState, before: SandboxState, tests_bytes: int) -> None:
    if state.moved:
        raise _RuinedError(f"{', '.join(state.moved[:3])} are not in their place")
    room_bytes = min(before.free_bytes // 2, ROOM_BYTES + 2 * tests_bytes)
    if state.free_bytes < room_bytes:
        raise _RuinedError(f"{state.free_bytes} bytes of the disk are free, and tests need {room_bytes}")
    room_files = min(before.free_files // 2, ROOM_FILES)
    if state.free_files < room_files:
        raise _RuinedError(f"{state.free_files} more files are allowed, and tests need {room_files}")


async def _discard_logs(sandbox: Sandbox) -> None:
    for path in (LOGS, HOME):
        try:
            await sandbox.discard(path)
        except NotADirectoryError:
            await sandbox.discard("/logs")


async def _run(
    sandbox: Sandbox, env: Mapping[str, str], command: list[str], *, stdin: bytes = b"", cwd: str = "/"
) -> None:
    """A program of the image, whose failure has one cause: what the agent left."""
    result = await sandbox.exec(command, env=env, stdin=stdin, cwd=cwd)
    if result.is_timed_out:
        raise VerifierError(f"{command[0]} did not end in time before the tests")
    if result.exit_code:
        raise _RuinedError(f"{' '.join(command)}: {result.text[-400:]}")


def _trusted_first(path: str, read_only: tuple[str, ...]) -> str:
    """A search path that begins with the directories that the agent could not write."""
    directories = [directory for directory in path.split(":") if directory.startswith("/")]
    trusted = [one for one in directories if _is_below(one, read_only)]
    return ":".join(dict.fromkeys([*trusted, *directories]))


def _is_below(path: str, places: tuple[str, ...]) -> bool:
    """True if it is one of these places, or in one of them."""
    return any(f"{path}/".startswith(f"{place}/") for place in places)


def _members(layer: Path, paths: tuple[str, ...]) -> bytes:
    """A tar file with those of these paths that the layer has, and what is below them."""
    buffer = io.BytesIO()
    with tarfile.open(layer) as source, tarfile.open(fileobj=buffer, mode="w") as target:
        for member in source:
            path = "/" + member.name.removeprefix("./")
            if _is_below(path, paths):
                target.addfile(member, source.extractfile(member) if member.isreg() else None)
        is_empty = not target.getmembers()
    return b"" if is_empty else buffer.getvalue()


async def _read_rewards(task: HarborTask, sandbox: Sandbox, output: str, exit_code: int) -> dict[str, float]:
    for name in ("reward.json", "reward.txt"):
        try:
            text = (await sandbox.read(f"{LOGS}/{name}", max_bytes=MAX_REWARD_BYTES)).decode()
            value = json.loads(text) if name.endswith("json") else float(text)
            rewards = value if isinstance(value, dict) else {"reward": value}
            numbers = {str(key): float(one) for key, one in rewards.items()}
            if numbers and all(map(math.isfinite, numbers.values())):
                return numbers
            raise ValueError("it has no finite number")
        except FileNotFoundError:
            continue
        except (OSError, ValueError, TypeError) as error:
            raise VerifierError(f"{task.name}: {LOGS}/{name} cannot be read: {error}") from error
    raise VerifierError(
        f"{task.name}: the verifier ended with code {exit_code} and wrote neither reward.txt nor reward.json in {LOGS}: "
        f"{output[-400:] or 'it printed nothing'}"
    )


def _nothing(reason: str) -> TaskVerdict:
    return TaskVerdict(reward=0.0, rewards={"reward": 0.0}, output=reason)


def _main_reward(rewards: Mapping[str, float]) -> float:
    """The value named `reward`, or else the mean of all."""
    return rewards["reward"] if "reward" in rewards else sum(rewards.values()) / len(rewards)
