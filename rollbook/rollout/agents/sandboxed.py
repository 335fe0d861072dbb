"""Runs a coding agent inside a sandbox. It has no network, and one port on its loopback that leads to its episode's proxy.

The sandbox sees the program and its interpreter read-only, a home with the program's configuration, and the working directory. When
the agent has ended, its processes are killed and the working directory is copied out, so that it can be scored.
"""

import asyncio
import io
import shutil
import tarfile
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rollbook.concurrency.deadline import finish
from rollbook.contracts.errors import EpisodeError
from rollbook.rollout.agents.coding_agents import CODING_AGENTS, CodingOptions, Launch, find_program, place_of
from rollbook.rollout.agents.program import (
    MAX_OUTPUT_BYTES,
    STDERR_CHARS,
    WORKSPACE,
    AgentError,
    AgentLog,
    AgentOutcomeError,
    Program,
)
from rollbook.rollout.contract import ChatSession
from rollbook.rollout.policy import pause_episode_time
from rollbook.sandbox.bubblewrap import Kind, open_sandbox
from rollbook.sandbox.sandbox import LIFETIME_S, SYSTEM_PATH, Image, Limits, Sandbox, SandboxLimitError

HOME, WORK, PORT = "/episode/home", "/episode/work", 8080
"""Inside the sandbox. Programs are there under the paths of this machine, which may begin with /work or /home."""
COPY_S = 30.0
"""Time limit for copying the working directory out."""
MAX_WORK_BYTES = 256 * 2**20
DEFAULT_LIMITS: Mapping[str, float] = {
    "memory_mb": 4096,
    "processes": 512,
    "disk_mb": 1024,
    "files": 100_000,
    "cpu_s": 3600.0,
}
"""A coding agent with its interpreter needs more than the command that it runs."""


def sandbox_limits(given: Mapping[str, float]) -> Limits:
    """Raises `ValueError` for a limit that does not exist or is not positive."""
    if unknown := sorted(given.keys() - DEFAULT_LIMITS.keys()):
        raise ValueError(
            f"sandbox_limits: {', '.join(unknown)}: there is no such limit; the limits are {', '.join(DEFAULT_LIMITS)}"
        )
    merged = {**DEFAULT_LIMITS, **given}
    return Limits(
        memory_mb=int(merged["memory_mb"]),
        cpu_s=merged["cpu_s"],
        processes=int(merged["processes"]),
        disk_mb=int(merged["disk_mb"]),
        files=int(merged["files"]),
        wall_s=LIFETIME_S,  # the agent's command runs while it waits for the policy; the episode has a deadline
    )


def sandboxed_program(name: str, options: CodingOptions, limits: Limits, *, kind: Kind = "bubblewrap") -> Program:
    """Like `coding_program`, in a sandbox. An agent that exceeds a limit of its sandbox ends with an `AgentOutcomeError`; its files
    are lost, so the reward function finds the working directory as it was at the start."""
    agent = CODING_AGENTS[name]
    program = find_program(name, path=options.environment.get("PATH")).resolve()
    directories = list(_directories(program, options.environment.get("PATH")))
    path = ":".join(
        dict.fromkeys([str(program.parent), *(f"{one}/bin" for one in directories), *map(str, directories)])
    )
    environment = {**options.environment, "PATH": f"{path}:{SYSTEM_PATH}", "HOME": HOME}

    async def run(row: dict[str, Any], session: ChatSession, log: AgentLog) -> str:
        proxy = urlsplit(session.base_url)
        launch = agent.launch(
            place_of(row, session, options, home=HOME, work=WORK, base_url=f"http://127.0.0.1:{PORT}{proxy.path}")
        )
        with tempfile.TemporaryDirectory(prefix="rollbook-layer-") as directory:
            layer = Path(directory, "layer.tar")
            await asyncio.to_thread(_pack, layer, Path(row[WORKSPACE]), launch)
            image = Image(layer=layer, binds={str(one): one for one in directories}, env=environment, workdir=WORK)
            async with AsyncExitStack() as stack:
                with pause_episode_time():  # the quota of the run may be used up
                    sandbox = await stack.enter_async_context(open_sandbox(image, limits, kind=kind))
                assert proxy.hostname is not None
                assert proxy.port is not None
                async with sandbox.forward(PORT, (proxy.hostname, proxy.port)):
                    await _play(sandbox, [str(program), *launch.arguments(options)], launch, Path(row[WORKSPACE]), log)
        return session.last_text

    return run


async def _play(sandbox: Sandbox, command: Sequence[str], launch: Launch, workspace: Path, log: AgentLog) -> None:
    try:
        result = await sandbox.exec(
            command,
            stdin=launch.stdin.encode(),
            env=launch.env,
            cwd=WORK,
            timeout_s=None,  # the episode has a deadline
            output_bytes=MAX_OUTPUT_BYTES,
            on_output=lambda _stream, printed: log.add(printed),
        )
        await _copy_out(sandbox, workspace)
    except SandboxLimitError as error:
        raise AgentOutcomeError(f"the sandbox ended the agent: {error}") from error
    except asyncio.CancelledError:
        # The time is over. What it did until then is scored.
        await finish(_copy_out(sandbox, workspace), within_s=COPY_S, name="agent.copy_out")
        raise
    if result.exit_code:
        output = result.stderr.decode(errors="replace").strip()[-STDERR_CHARS:]
        # Only the policy's own commands can signal it.
        error_class = AgentOutcomeError if result.exit_code < 0 else AgentError
        raise error_class(f"the agent's command ended with code {result.exit_code}: {output}")


def _pack(layer: Path, workspace: Path, launch: Launch) -> None:
    with tarfile.open(layer, "w") as tar:
        tar.add(workspace, arcname=WORK.lstrip("/"))
        for at, text in {**launch.files, ".profile": ""}.items():
            entry = tarfile.TarInfo(f"{HOME.lstrip('/')}/{at}")
            entry.size = len(text.encode())
            tar.addfile(entry, io.BytesIO(text.encode()))


async def _copy_out(sandbox: Sandbox, workspace: Path) -> None:
    """Replace the files of `workspace` by those of the sandbox. Links and devices are not copied: they could lead elsewhere."""
    await sandbox.end_processes()
    packed = await sandbox.exec(
        ["tar", "--create", "--file=-", f"--directory={WORK}", "."], timeout_s=COPY_S, output_bytes=MAX_WORK_BYTES
    )
    reason = f"the working directory cannot be copied out of the sandbox within {COPY_S:g} s"
    if packed.is_timed_out:
        raise EpisodeError(reason)
    try:
        if packed.exit_code or packed.dropped_bytes:
            raise tarfile.TarError(f"tar ended with code {packed.exit_code}, {packed.dropped_bytes} bytes are too many")
        await asyncio.to_thread(_unpack, packed.stdout, workspace)
    except tarfile.TarError as error:
        # Too large, or with files that its owner has made unreadable: what the agent left.
        printed = packed.stderr.decode(errors="replace")[:STDERR_CHARS]
        raise AgentOutcomeError(f"{reason}: {error}. {printed}".strip()) from error


def _unpack(packed: bytes, workspace: Path) -> None:
    with tempfile.TemporaryDirectory(dir=workspace.parent, prefix=workspace.name) as directory:
        unpacked = Path(directory, "work")
        unpacked.mkdir()
        with tarfile.open(fileobj=io.BytesIO(packed)) as tar:
            for member in tar:
                if member.isfile() or member.isdir():
                    tar.extract(member, unpacked, filter="data")
        shutil.rmtree(workspace)
        unpacked.rename(workspace)


def _directories(program: Path, path: str | None) -> Iterator[Path]:
    """The directories that a program needs and that a sandbox does not see: its installation, and that of its interpreter."""
    interpreter = _interpreter(program, path)
    for one in (program, *(() if interpreter is None else (interpreter, interpreter.resolve()))):
        root = _installation(one)
        if not root.is_relative_to("/usr"):
            yield root
        library = one.resolve().parent.parent / "lib"
        if one == interpreter and not library.is_relative_to("/usr") and library.is_dir():
            yield library  # the standard library of a virtual environment's Python


def _installation(program: Path) -> Path:
    """The packages of Node or the virtual environment that it belongs to, or else its directory; in a home only the file."""
    for parent in program.parents:
        if parent.name == "node_modules" or (parent / "pyvenv.cfg").is_file():
            return parent
    return program if program.parent in {Path.home(), Path("/")} else program.parent


def _interpreter(program: Path, path: str | None) -> Path | None:
    """From the first line of a script: `#!/path/to/python`, `#!/usr/bin/env node`."""
    with program.open("rb") as file:
        first = file.readline(1024)
    if not first.startswith(b"#!"):
        return None
    words = first[2:].decode(errors="replace").split()
    found = shutil.which(words[-1] if words[0].endswith("/env") else words[0], path=path)
    return None if found is None else Path(found)
