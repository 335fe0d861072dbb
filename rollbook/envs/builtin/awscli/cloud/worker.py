"""The parent's side of a warm AWS CLI process: run a command line, call the API, and restart the process when it hangs."""

import asyncio
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rollbook.concurrency.child_process.process import ChildEndedError, ChildProcess
from rollbook.concurrency.deadline import Deadline, DeadlineExceededError
from rollbook.contracts.plugin import install_command
from rollbook.envs.sandboxes.process import private_directory, remove_directory, start_sandbox_process
from rollbook.envs.sandboxes.sandbox import SandboxStartError
from rollbook.sandbox.sandbox import SandboxDiedError

MODULE = "rollbook.envs.builtin.awscli.cloud.worker_process"
# A command that hit its limit is reported with the code that `timeout` uses.
TIMED_OUT = 124
START_S = 60.0
CALLS_S = 30.0
# The process itself stops a late command; if it does not, it is killed this much later.
GRACE_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandResult:
    """The output of one command."""

    rc: int
    stdout: str
    stderr: str
    dropped_bytes: int = 0

    @property
    def is_timeout(self) -> bool:
        return self.rc == TIMED_OUT


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiCall:
    """One API request: `ApiCall(service="s3", operation="get_bucket_versioning", params={"Bucket": "a"})`."""

    service: str
    operation: str
    params: Mapping[str, Any] = field(default_factory=dict)
    region: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiAnswer:
    """The API's response: a result, or an error code."""

    result: Any = None
    code: str | None = None
    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """Without an `endpoint`, the real account whose credentials are in `environment`."""

    name: str
    endpoint: str | None
    environment: Mapping[str, str]
    command_s: float
    max_output_bytes: int


class AwsWorker:
    """One warm CLI process with its own scratch directory. It runs one call at a time."""

    def __init__(self, child: ChildProcess, directory: Path, settings: WorkerSettings) -> None:
        self._child = child
        self._directory = directory
        self._settings = settings
        self._lock = asyncio.Lock()

    @classmethod
    async def start(cls, settings: WorkerSettings) -> "AwsWorker":
        directory = private_directory(f"{settings.name}-cli")
        try:
            (directory / "files").mkdir()
            return cls(await _started(directory, settings), directory, settings)
        except BaseException:
            remove_directory(directory)
            raise

    @property
    def scratch(self) -> Path:
        """The working directory of the agent's commands, with its local files."""
        return self._directory / "files"

    @property
    def is_alive(self) -> bool:
        return self._child.is_alive

    @property
    def pid(self) -> int:
        return self._child.pid

    def memory_bytes(self) -> int:
        return self._child.memory_bytes()

    async def ended(self) -> None:
        """Returns when the process has died. A restart by `_restart` does not count."""
        child = None
        while child is not self._child:
            child = self._child
            await child.ended()
            async with self._lock:  # a restart in progress replaces the child first
                pass

    async def run(self, argv: Sequence[str]) -> CommandResult:
        """Run one command, given without the leading `aws`. A late command is stopped, with the code 124."""
        async with self._lock:
            try:
                reply = await self._request({"run": list(argv)}, self._settings.command_s + GRACE_S)
            except DeadlineExceededError:
                await self._restart()
                limit = f"the command did not finish within {self._settings.command_s:g} s and was stopped"
                return CommandResult(rc=TIMED_OUT, stdout="", stderr=limit)
            return CommandResult(**reply)

    async def call_api(self, calls: Sequence[ApiCall]) -> list[ApiAnswer]:
        """Call the API, in order. Raises `SandboxDiedError` without a response, `ValueError` for a call that does not exist."""
        if not calls:
            return []
        async with self._lock:
            try:
                reply = await self._request({"calls": [asdict(call) for call in calls]}, CALLS_S)
            except DeadlineExceededError as error:
                await self._restart()
                raise SandboxDiedError(f"{self._settings.name}: the API did not answer: {error}") from error
        answers = reply["answers"]
        for answer in answers:
            if "unreachable" in answer:
                raise SandboxDiedError(f"{self._settings.name}: the API cannot be reached: {answer['unreachable']}")
            if "invalid" in answer:
                raise ValueError(f"not a valid API call: {answer['invalid']}")
        return [ApiAnswer(**answer) for answer in answers]

    async def clean(self) -> None:
        """Empty the scratch directory. The directory itself stays: it is the working directory of the process."""
        for path in self.scratch.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)

    async def restart_if_dead(self) -> None:
        """For a cloud that outlives its worker. A pool of simulators replaces both."""
        async with self._lock:
            if not self._child.is_alive:
                await self._restart()

    async def stop(self) -> None:
        await self._child.kill()
        remove_directory(self._directory)

    async def _request(self, message: Mapping[str, Any], within_s: float) -> dict[str, Any]:
        try:
            async with Deadline(within_s, "command").limit("a command of the AWS CLI"):
                self._child.send(json.dumps(message).encode())
                reply: dict[str, Any] = json.loads(await self._child.receive())
                return reply
        except ChildEndedError as error:
            raise SandboxDiedError(
                f"{self._settings.name}: the CLI worker died: it {error}; {self._child.last_output()}"
            ) from error
        except asyncio.CancelledError:
            # The reply to this request must not be read as the reply to the next one.
            await self._child.kill()
            raise

    async def _restart(self) -> None:
        await self._child.kill()
        self._child = await _started(self._directory, self._settings)


async def _started(directory: Path, settings: WorkerSettings) -> ChildProcess:
    child = await start_sandbox_process(
        MODULE,
        settings={
            "endpoint": settings.endpoint,
            "scratch": str(directory / "files"),
            "max_output_bytes": settings.max_output_bytes,
            "command_s": settings.command_s,
        },
        directory=directory,
        environment=settings.environment,
    )
    try:
        async with Deadline(START_S, "worker start").limit("the AWS CLI worker"):
            await child.receive()
    except (ChildEndedError, DeadlineExceededError) as error:
        await child.kill()
        raise SandboxStartError(
            f"the AWS CLI worker did not start: {error}; is the extra installed ({install_command('aws')})? "
            f"{child.last_output()}"
        ) from error
    except BaseException:
        await child.kill()
        raise
    return child
