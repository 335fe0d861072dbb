"""The parent's side of a warm AWS CLI: play a command line, ask the API, and start anew when the worker hangs."""

import asyncio
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollbook.concurrency.deadline import Deadline, DeadlineExceededError
from rollbook.envs.sandboxes.process import Child, ChildSpec, private_directory, remove_directory
from rollbook.envs.sandboxes.sandbox import SandboxDiedError, SandboxStartError

MODULE = "rollbook.envs.builtin.awscli.cloud.worker_process"
# A command that hit its limit is reported with the code that `timeout` uses.
TIMED_OUT = 124
START_S = 60.0
CALLS_S = 30.0
# The worker itself stops what it can; this much later it is killed, with the command it plays.
GRACE_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandResult:
    """What the agent's terminal showed."""

    rc: int
    stdout: str
    stderr: str
    dropped_bytes: int = 0

    @property
    def is_timeout(self) -> bool:
        return self.rc == TIMED_OUT


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiCall:
    """One question to the API: `ApiCall(service="s3", operation="get_bucket_versioning", params={"Bucket": "a"})`."""

    service: str
    operation: str
    params: Mapping[str, Any] = field(default_factory=dict)
    region: str | None = None

    def message(self) -> dict[str, Any]:
        return {
            "service": self.service,
            "operation": self.operation,
            "params": dict(self.params),
            "region": self.region,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiAnswer:
    """What the API said: a result, or the code of its refusal."""

    result: Any = None
    code: str | None = None
    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """`endpoint` None: the real account that `environment` holds the credentials of."""

    name: str
    endpoint: str | None
    environment: Mapping[str, str]
    command_s: float
    max_output_bytes: int


class AwsWorker:
    """One warm CLI with a scratch directory of its own. Calls to one worker never overlap."""

    def __init__(self, child: Child, directory: Path, settings: WorkerSettings) -> None:
        self._child = child
        self._directory = directory
        self._settings = settings
        self._turn = asyncio.Lock()
        self.restarts = 0

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
        """Where the agent's local files are: the working directory of its commands."""
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
        """Returns when the worker has died by itself; a restart of our own is not a death."""
        child = None
        while child is not self._child:
            child = self._child
            await child.ended()
            async with self._turn:  # a restart in progress puts a new child in place first
                pass

    async def run(self, argv: Sequence[str]) -> CommandResult:
        """Play one command, without the leading `aws`. Over its time it is stopped, with the code 124."""
        async with self._turn:
            try:
                reply = await self._ask({"run": list(argv)}, self._settings.command_s + GRACE_S)
            except DeadlineExceededError:
                await self._restart()
                limit = f"the command did not finish within {self._settings.command_s:g} s and was stopped"
                return CommandResult(rc=TIMED_OUT, stdout="", stderr=limit)
            return CommandResult(**reply)

    async def ask(self, calls: Sequence[ApiCall]) -> list[ApiAnswer]:
        """Ask the API, in order. Raises `SandboxDiedError` when nobody answers, `ValueError` for a call that does not exist."""
        if not calls:
            return []
        async with self._turn:
            try:
                reply = await self._ask({"calls": [call.message() for call in calls]}, CALLS_S)
            except DeadlineExceededError as error:
                await self._restart()
                raise SandboxDiedError(f"{self._settings.name}: the API did not answer: {error}") from error
        answers = reply["answers"]
        for answer in answers:
            if "unreachable" in answer:
                raise SandboxDiedError(f"{self._settings.name}: the API cannot be reached: {answer['unreachable']}")
            if "invalid" in answer:
                raise ValueError(f"the API knows no such call: {answer['invalid']}")
        return [ApiAnswer(**answer) for answer in answers]

    async def clean(self) -> None:
        """Empty the scratch directory; the directory itself stays, since the worker stands in it."""
        for path in self.scratch.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)

    async def stop(self) -> None:
        await self._child.kill()
        remove_directory(self._directory)

    async def _ask(self, message: Mapping[str, Any], within_s: float) -> dict[str, Any]:
        try:
            async with Deadline(within_s, "command").limit("a command of the AWS CLI"):
                await self._child.send(message)
                return await self._child.receive()
        except (EOFError, OSError) as error:
            raise SandboxDiedError(
                f"{self._settings.name}: the CLI worker died: {error}; {self._child.last_words()}"
            ) from error
        except asyncio.CancelledError:
            # The answer to a question nobody waits for any more must not be read as the answer to the next one.
            await self._child.kill()
            raise

    async def _restart(self) -> None:
        await self._child.kill()
        self.restarts += 1
        self._child = await _started(self._directory, self._settings)


async def _started(directory: Path, settings: WorkerSettings) -> Child:
    child = await Child.start(
        ChildSpec(
            module=MODULE,
            settings={
                "endpoint": settings.endpoint,
                "scratch": str(directory / "files"),
                "max_output_bytes": settings.max_output_bytes,
                "command_s": settings.command_s,
            },
            directory=directory,
            environment=settings.environment,
        )
    )
    try:
        async with Deadline(START_S, "worker start").limit("the AWS CLI worker"):
            await child.receive()
    except (EOFError, DeadlineExceededError) as error:
        await child.kill()
        raise SandboxStartError(
            f"the AWS CLI worker did not start: {error}; is the extra installed (pip install 'rollbook[aws]')? {child.last_words()}"
        ) from error
    except BaseException:
        await child.kill()
        raise
    return child
