"""Runs a coding agent or a command inside a sandbox. It has no network, and one port on its loopback that leads to its episode's
proxy.

The sandbox sees the program and its interpreter read-only, a home with the program's configuration, and the working directory. When
the agent has ended, its processes are killed and the working directory is copied out, so that it can be scored.

For a Harbor task it is the sandbox of the task's image, in which the verifier runs afterwards.
"""

import asyncio
import io
import json
import os
import shutil
import tarfile
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import urlsplit

from rollbook.concurrency.deadline import finish
from rollbook.contracts.errors import EpisodeError, RunError
from rollbook.rollout.agents.coding_agents import CODING_AGENTS, CodingOptions, Launch, find_program, place_of
from rollbook.rollout.agents.program import (
    MAX_OUTPUT_BYTES,
    STDERR_CHARS,
    WORKSPACE,
    AgentError,
    AgentLog,
    AgentOutcomeError,
    Program,
    addresses,
    printed_result,
)
from rollbook.rollout.contract import ChatSession
from rollbook.rollout.policy import pause_episode_time
from rollbook.sandbox.bubblewrap import Kind, open_sandbox
from rollbook.sandbox.harbor.image import root_of
from rollbook.sandbox.harbor.task import HarborTask, read_task
from rollbook.sandbox.harbor.trial import Trial, open_trial
from rollbook.sandbox.harbor.verifier import TaskVerdict
from rollbook.sandbox.root import search_path
from rollbook.sandbox.sandbox import LIFETIME_S, SYSTEM_PATH, ExecResult, Image, Limits, Sandbox, SandboxLimitError

HOME, WORK, PORT = "/episode/home", "/episode/work", 8080
"""Inside the sandbox. Programs are there under the paths of this machine, which may begin with /work or /home."""
COPY_S = 30.0
"""Time limit for copying the working directory out."""
MAX_WORK_BYTES = 256 * 2**20
MAX_PATH_BYTES, MAX_DEPTH = 1024, 100
"""Limits of what is copied out. Python removes directories by recursion, so deep ones would stay on this machine."""
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


LaunchAt: TypeAlias = Callable[[Mapping[str, Any], ChatSession, str, str], Launch]
"""What to run for a row: with the session, the working directory and the address of the episode as the program sees them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InstalledAgent:
    """A coding agent, or a command that is one, on this machine."""

    setting: str
    """As the run file names it: `agent = "codex"`."""
    program: Path
    interpreter: Path | None
    """If the program is a script."""
    is_interpreter_searched: bool = False
    """The script leaves its interpreter to the search path: `#!/usr/bin/env node`."""
    reads: tuple[Path, ...]
    """What it needs and a sandbox does not see."""
    environment: Mapping[str, str]
    launch_at: LaunchAt
    prints_result: bool = False
    """The last line of its output is the result. Otherwise it is the last text of the conversation."""

    @classmethod
    def locate(cls, name: str, options: CodingOptions) -> "InstalledAgent":
        """A coding agent. Raises `RunError` if it is not installed."""
        path = options.environment.get("PATH")
        program = find_program(name, path=path).resolve()
        words = _first_line(program)
        interpreter = _interpreter(words, path)

        def launch_at(row: Mapping[str, Any], session: ChatSession, work: str, base_url: str) -> Launch:
            place = place_of(row, session, options, home=HOME, work=work, base_url=base_url)
            launch = CODING_AGENTS[name].launch(place)
            return replace(launch, command=[launch.command[0], *launch.arguments(options)])

        return cls(
            setting=f"agent = {name!r}",
            program=program,
            interpreter=interpreter,
            is_interpreter_searched=interpreter is not None and len(words) == 2 and words[0].endswith("/env"),
            reads=tuple(_directories(program, interpreter)),
            environment=options.environment,
            launch_at=launch_at,
        )

    @classmethod
    def of_command(
        cls, command: Sequence[str], environment: Mapping[str, str], reads: Sequence[str]
    ) -> "InstalledAgent":
        """A command, which gets the row as JSON on standard input. It also sees `reads`, and the files that its arguments name.
        Raises `RunError` if it or one of `reads` does not exist."""
        path = environment.get("PATH")
        found = shutil.which(command[0], path=path)
        if found is None:
            raise RunError(
                f"command: there is no program {command[0]!r} in the search path of this process; install it or give its path"
            )
        # Not resolved: the Python of a virtual environment is a link.
        program = Path(found).absolute()
        interpreter = program if program.is_symlink() else _interpreter(_first_line(program), path)
        if missing := [one for one in reads if not Path(one).exists()]:
            raise RunError(f"reads: {', '.join(missing)}: there is no such file or directory on this machine")
        arguments = [str(Path(one).absolute()) if Path(one).is_file() else one for one in command[1:]]
        files = [Path(one) for one in (*arguments, *reads) if one in reads or Path(one).is_file()]

        def launch_at(row: Mapping[str, Any], session: ChatSession, work: str, base_url: str) -> Launch:
            seen = {**row, WORKSPACE: work} if WORKSPACE in row else row
            return Launch(command=[command[0], *arguments], env=addresses(base_url, session.id), stdin=json.dumps(seen))

        return cls(
            setting=f"command = {list(command)!r}",
            program=program,
            interpreter=interpreter,
            reads=(*_directories(program, interpreter), *(one.absolute() for one in files)),
            environment=environment,
            launch_at=launch_at,
            prints_result=True,
        )

    @property
    def binds(self) -> dict[str, Path]:
        return {str(one): one for one in self.reads}

    @property
    def search_path(self) -> str:
        bins = (f"{one}/bin" for one in self.reads)
        return ":".join(dict.fromkeys([str(self.program.parent), *bins, *map(str, self.reads)]))

    def launch(self, row: Mapping[str, Any], session: ChatSession, work: str) -> Launch:
        base_url = f"http://127.0.0.1:{PORT}{urlsplit(session.base_url).path}"
        return self.launch_at(row, session, work, base_url)

    def command(self, launch: Launch) -> list[str]:
        # An image may have another interpreter of the same name.
        interpreter = [str(self.interpreter)] if self.is_interpreter_searched else []
        return [*interpreter, str(self.program), *launch.command[1:]]

    def result(self, ended: ExecResult, session: ChatSession) -> Any:
        """Raises `AgentError` if it failed."""
        if ended.exit_code:
            output = ended.stderr.decode(errors="replace").strip()[-STDERR_CHARS:]
            # By a signal of the policy's own commands: a SIGKILL of the machine has raised an error.
            error_class = AgentOutcomeError if ended.exit_code < 0 else AgentError
            raise error_class(f"the agent's command ended with code {ended.exit_code}: {output}")
        return printed_result(ended.stdout) if self.prints_result else session.last_text


def sandboxed_program(agent: InstalledAgent, limits: Limits, *, kind: Kind = "bubblewrap") -> Program:
    """Like `coding_program`, in a sandbox. An agent that exceeds a limit of its sandbox ends with an `AgentOutcomeError`; its files
    are lost, so the reward function finds the working directory as it was at the start."""
    environment = {**agent.environment, "PATH": f"{agent.search_path}:{SYSTEM_PATH}", "HOME": HOME}

    async def run(row: dict[str, Any], session: ChatSession, log: AgentLog) -> Any:
        launch, workspace = agent.launch(row, session, WORK), Path(row[WORKSPACE])
        with tempfile.TemporaryDirectory(prefix="rollbook-layer-") as directory:
            layer = Path(directory, "layer.tar")
            await asyncio.to_thread(_pack, layer, workspace, launch)
            image = Image(layer=layer, binds=agent.binds, env=environment, workdir=WORK)
            async with AsyncExitStack() as stack:
                with pause_episode_time():  # the quota of the run may be used up
                    sandbox = await stack.enter_async_context(open_sandbox(image, limits, kind=kind))
                try:
                    result = await _play(sandbox, agent.command(launch), launch.env, launch.stdin, session, log)
                    await _copy_out(sandbox, workspace)
                except SandboxLimitError as error:
                    raise AgentOutcomeError(f"the sandbox ended the agent: {error}") from error
                except asyncio.CancelledError:
                    # The time is over. What it did until then is scored.
                    await finish(_copy_out(sandbox, workspace), within_s=COPY_S, name="agent.copy_out")
                    raise
        return agent.result(result, session)

    return run


@dataclass(frozen=True, slots=True)
class HarborAgent:
    """Plays Harbor tasks with an agent in the images of the tasks."""

    agent: InstalledAgent
    images: Mapping[str, str]
    """Local roots of base images, or `host`: programs of this machine."""
    limits: Limits
    """The least that a sandbox allows: the task's, if they are larger."""
    kind: Kind = "bubblewrap"

    @asynccontextmanager
    async def open_trial(self, row: Mapping[str, Any]) -> AsyncIterator[Trial]:
        if "path" not in row:
            raise RunError('reward = "harbor": the task lacks path; set tasks.source = "harbor:DIR"')
        task = await asyncio.to_thread(read_task, Path(row["path"]))
        self._require_visible(task)
        largest = {name: max(getattr(self.limits, name), getattr(task.limits, name)) for name in DEFAULT_LIMITS}
        limits = replace(self.limits, **{**largest, "disk_mb": task.limits.disk_mb})
        trial = open_trial(task, images=self.images, kind=self.kind, binds=self.agent.binds, limits=limits)
        async with AsyncExitStack() as stack:
            with pause_episode_time():  # the image may have to be built
                opened = await stack.enter_async_context(trial)
            yield opened

    def program(self, trial: Trial) -> Program:
        """The agent finds the programs of the image before its own. Its home is not that of the verifier."""
        workdir = trial.image.workdir
        path = f"{search_path(trial.image)}:{self.agent.search_path}"
        environment = {**self.agent.environment, "PATH": path, "HOME": HOME}

        async def run(row: dict[str, Any], session: ChatSession, log: AgentLog) -> Any:
            launch = self.agent.launch(row, session, workdir)
            try:
                for at, text in launch.files.items():
                    await trial.sandbox.write(f"{HOME}/{at}", text.encode())
                command, env = self.agent.command(launch), {**environment, **launch.env}
                result = await _play(trial.sandbox, command, env, launch.stdin, session, log, cwd=workdir)
            except SandboxLimitError as error:
                raise AgentOutcomeError(f"the sandbox ended the agent: {error}") from error
            return self.agent.result(result, session)

        return run

    async def verify(self, trial: Trial) -> TaskVerdict:
        """The time of the tests is not that of the episode: the task limits it."""
        with pause_episode_time():
            return await trial.verify()

    def _require_visible(self, task: HarborTask) -> None:
        """An image with a root of its own has its own `/usr`."""
        root = root_of(task.recipe.base, self.images)
        used = (self.agent.program, *(() if self.agent.interpreter is None else (self.agent.interpreter,)))
        if root is None:
            return
        for one in used:
            if one.is_relative_to("/usr") and not (root / one.relative_to("/")).exists():
                raise RunError(
                    f"{self.agent.setting}: {one} is not in {root}, the root of {task.recipe.base}: install it there, or "
                    "install the agent with its interpreter outside of /usr, from where it is bound into the sandbox"
                )


async def _play(  # noqa: PLR0917 - two callers
    sandbox: Sandbox,
    command: Sequence[str],
    env: Mapping[str, str],
    stdin: str,
    session: ChatSession,
    log: AgentLog,
    *,
    cwd: str = WORK,
) -> ExecResult:
    proxy = urlsplit(session.base_url)
    assert proxy.hostname is not None
    assert proxy.port is not None
    async with sandbox.forward(PORT, (proxy.hostname, proxy.port)):
        return await sandbox.exec(
            command,
            stdin=stdin.encode(),
            env=env,
            cwd=cwd,
            timeout_s=None,  # the episode has a deadline
            output_bytes=MAX_OUTPUT_BYTES,
            on_output=lambda _stream, printed: log.add(printed),
            reports_kill=True,
            is_trusted=True,
        )


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
    reason = "the working directory cannot be copied out of the sandbox"
    packed = await _packed(sandbox)
    if packed is None:
        raise AgentOutcomeError(f"{reason}: its files have more than {MAX_WORK_BYTES} bytes")
    if packed.is_timed_out:
        raise EpisodeError(f"{reason} within {COPY_S:g} s")
    try:
        if packed.exit_code:
            raise tarfile.TarError(f"tar ended with code {packed.exit_code}")
        await asyncio.to_thread(_unpack, packed.stdout, workspace)
    except tarfile.TarError as error:
        # Too large, too deep, or with files that its owner has made unreadable: what the agent left.
        printed = packed.stderr.decode(errors="replace")[:STDERR_CHARS]
        raise AgentOutcomeError(f"{reason}: {error}. {printed}".strip()) from error


async def _packed(sandbox: Sandbox) -> ExecResult | None:
    """The working directory as a tar file. None: it is too large, which is known before all of it was read."""
    is_full, size = asyncio.Event(), 0

    def count(_stream: str, data: bytes) -> None:
        nonlocal size
        size += len(data)
        if size >= MAX_WORK_BYTES:
            is_full.set()

    # Sparse: a file of holes takes no disk, and would be written for hours.
    command = ["tar", "--create", "--sparse", "--file=-", f"--directory={WORK}", "."]
    running = sandbox.exec(command, timeout_s=COPY_S, output_bytes=MAX_WORK_BYTES, on_output=count)
    packing = asyncio.create_task(running, name="agent.pack")
    filling = asyncio.create_task(is_full.wait(), name="agent.pack_limit")
    try:
        await asyncio.wait({packing, filling}, return_when=asyncio.FIRST_COMPLETED)
        return None if is_full.is_set() else packing.result()
    finally:
        for task in (packing, filling):
            task.cancel()
        await asyncio.wait({packing, filling})


def _unpack(packed: bytes, workspace: Path) -> None:
    with tempfile.TemporaryDirectory(dir=workspace.parent, prefix=workspace.name) as directory:
        unpacked = Path(directory, "work")
        unpacked.mkdir()
        with tarfile.open(fileobj=io.BytesIO(packed)) as tar:
            room = MAX_WORK_BYTES
            for member in tar:
                room -= member.size
                if room < 0:
                    raise tarfile.TarError(f"its files have more than {MAX_WORK_BYTES} bytes")
                if len(os.fsencode(member.name)) > MAX_PATH_BYTES or member.name.count("/") > MAX_DEPTH:
                    raise tarfile.TarError(f"the path {member.name[:60]!r}... is too long or too deep")
                if member.isfile() or member.isdir():
                    tar.extract(member, unpacked, filter="data")
        shutil.rmtree(workspace)
        unpacked.rename(workspace)


def _directories(program: Path, interpreter: Path | None) -> Iterator[Path]:
    """The directories that a program needs and that a sandbox does not see: its installation, and that of its interpreter."""
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


def _first_line(program: Path) -> list[str]:
    """The words after `#!`, or none: `/path/to/python`, or `/usr/bin/env` and `node`."""
    with program.open("rb") as file:
        first = file.readline(1024)
    return first[2:].decode(errors="replace").split() if first.startswith(b"#!") else []


def _interpreter(words: Sequence[str], path: str | None) -> Path | None:
    if not words:
        return None
    found = shutil.which(words[-1] if words[0].endswith("/env") else words[0], path=path)
    return None if found is None else Path(found)
