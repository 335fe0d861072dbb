"""The AWS CLI loaded once in the worker process, with captured and bounded output, and a reset of its state after each command.

A CLI driver is made for one command: it keeps state of the previous one (a region, the validators of another operation) that breaks
the next. Plain API operations therefore run with one warm driver whose state is undone after each command, and so do unknown
operations, which the parser refuses. All other commands (file transfers, waiters, help, options that change the session) run with a
fresh driver in a fork of this process.
"""

import io
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Any, ClassVar

import awscli.help  # type: ignore[import-untyped]  # the package ships no types; the same holds for the lines below
import awscli.paramfile  # type: ignore[import-untyped]
from awscli.clidriver import (  # type: ignore[import-untyped]
    ServiceCommand,
    ServiceOperation,
    create_clidriver,
)
from botocore.hooks import HierarchicalEmitter  # type: ignore[import-untyped]

from rollbook.envs.builtin.awscli.commands import is_help, matching_options

NOTICE = "Note: AWS CLI version 2, the latest major version of the AWS CLI, is now stable"


class Bounded(io.BytesIO):
    """Keeps the first `limit` bytes and only counts the rest, which bounds memory."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit
        self.dropped = 0

    def write(self, data: Any) -> int:
        size = len(data)
        free = max(0, self.limit - self.tell())
        self.dropped += max(0, size - free)
        super().write(data[:free])
        return size

    def text(self) -> str:
        return self.getvalue().decode("utf-8", errors="replace")


class PlainHelp:
    """Prints help without a pager, which would be another program."""

    def render(self, contents: bytes) -> None:
        sys.stdout.write(contents.decode("utf-8", errors="replace"))


class RecordingEmitter(HierarchicalEmitter):  # type: ignore[misc]  # its base has no types
    """The event emitter of a session, which records the handlers that a command registers and removes them afterwards.

    Clients use copies; only the original records. Registering a unique handler again has no effect, and undoing that would remove
    the first registration, so it is not recorded.
    """

    original: "RecordingEmitter | None" = None
    recorded: ClassVar[list[tuple[Any, ...]]] = []

    @contextmanager
    def one_command(self) -> Iterator[None]:
        RecordingEmitter.original = self
        try:
            yield
        finally:
            RecordingEmitter.original = None
            while self.recorded:
                event, handler, unique_id, counts_uses = self.recorded.pop()
                self.unregister(event, handler, unique_id=unique_id, unique_id_uses_count=counts_uses)

    def _register_section(
        self, event_name: str, handler: Any, unique_id: Any, unique_id_uses_count: bool, section: Any
    ) -> None:
        is_known = unique_id is not None and unique_id in self._unique_id_handlers
        if self is RecordingEmitter.original and (unique_id_uses_count or not is_known):
            self.recorded.append((event_name, handler, unique_id, unique_id_uses_count))
        super()._register_section(event_name, handler, unique_id, unique_id_uses_count, section)


class WarmCli:
    """The command line of one agent. `endpoint` is appended to every command; None keeps the CLI's default."""

    def __init__(self, *, endpoint: str | None, max_output_bytes: int, read_s: float) -> None:
        self._max_output_bytes = max_output_bytes
        self._appended = [] if endpoint is None else ["--endpoint-url", endpoint]
        self._appended += ["--cli-connect-timeout", "5", "--cli-read-timeout", str(max(1, round(read_s)))]
        # A parameter value with the prefix `file://`, `fileb://` or `http://` would read from this machine.
        awscli.paramfile.LOCAL_PREFIX_MAP.clear()
        awscli.paramfile.REMOTE_PREFIX_MAP.clear()
        awscli.help.get_renderer = PlainHelp
        sys.argv = ["aws"]
        self._fresh: Any = None
        self._warm = create_clidriver()
        self._commands = self._warm._get_command_table()
        self._global_options = [f"--{name}" for name in self._warm._get_argument_table()]
        self._events = self._warm.session.get_component("event_emitter")._emitter
        self._events.__class__ = RecordingEmitter

    @property
    def loader(self) -> Any:
        """Loads and caches service descriptions; shared with `Api`."""
        return self._warm.session.get_component("data_loader")

    def run(self, argv: list[str]) -> dict[str, Any] | None:
        """Run one command, without the leading `aws`. Returns None if it must run in a fork, with `run_once`."""
        operation = self._plain_operation(argv)
        if operation is None and not self._is_unknown(argv):
            self._prepare_fresh()
            return None
        try:
            with self._events.one_command():
                return self._captured(self._warm, [*argv, *self._appended])
        finally:
            if operation is not None:
                # The next run computes the arguments again and registers their handlers.
                operation._arg_table = None

    def warm_up(self) -> None:
        """Run a harmless command, to import, compile and register everything that happens once in a session."""
        self._captured(self._warm, ["sts", "get-caller-identity", *self._appended])

    def run_once(self, argv: list[str]) -> dict[str, Any]:
        """Run one command with the fresh driver, in a process that ends afterwards."""
        return self._captured(self._fresh, argv if is_help(argv) else [*argv, *self._appended])

    def _prepare_fresh(self) -> None:
        """Create the fresh driver once, so that every fork inherits it. Many sessions never need it."""
        if self._fresh is None:
            self._fresh = create_clidriver()
            self._fresh.session.register_component("data_loader", self.loader)

    def _plain_operation(self, argv: list[str]) -> Any:
        """The API operation of a command line; None for every other kind of command."""
        if len(argv) < 2 or "help" in argv or self._changes_session(argv):
            return None
        service = self._commands.get(argv[0])
        if type(service) is not ServiceCommand:
            return None
        operation = service._get_command_table().get(argv[1])
        return operation if type(operation) is ServiceOperation else None

    def _changes_session(self, argv: list[str]) -> bool:
        """Whether a word may be a global option, in any spelling. The driver keeps their values for all later commands."""
        return any(matching_options(word, self._global_options) for word in argv)

    def _is_unknown(self, argv: list[str]) -> bool:
        """Whether the service or operation does not exist, which is common early in training. The parser refuses such a command
        before the driver's state changes, so it needs no fork, which takes four times as long as a command."""
        if not argv or argv[0].startswith("-") or "help" in argv or self._changes_session(argv):
            return False
        service = self._commands.get(argv[0])
        if service is None:
            return True
        if type(service) is not ServiceCommand or len(argv) < 2 or argv[1].startswith("-"):
            return False
        return argv[1] not in service._get_command_table()

    def _captured(self, driver: Any, argv: list[str]) -> dict[str, Any]:
        out, err = Bounded(self._max_output_bytes), Bounded(self._max_output_bytes)
        with (
            io.TextIOWrapper(out, encoding="utf-8", write_through=True) as out_text,
            io.TextIOWrapper(err, encoding="utf-8", write_through=True) as err_text,
        ):
            with redirect_stdout(out_text), redirect_stderr(err_text), _same_log_handlers():
                rc = _exit_code(driver, argv)
            texts = {"stdout": out.text(), "stderr": _without_notice(err.text())}
        return {"rc": rc, **texts, "dropped_bytes": out.dropped + err.dropped}


@contextmanager
def _same_log_handlers() -> Iterator[None]:
    """Remove the log handler that the CLI adds for each command. It would keep the output of the command for ever."""
    logger = logging.getLogger("awscli")
    before = list(logger.handlers)
    try:
        yield
    finally:
        logger.handlers[:] = before


def _exit_code(driver: Any, argv: list[str]) -> int:
    try:
        return int(driver.main(argv) or 0)
    except SystemExit as ended:  # wrong usage
        return ended.code if isinstance(ended.code, int) else 2
    except Exception as error:  # the agent's input can break any part of the CLI, and the agent must see the error
        sys.stderr.write(f"\naws: {type(error).__name__}: {error}\n")
        return 255


def _without_notice(text: str) -> str:
    return "\n".join(line for line in text.splitlines() if NOTICE not in line).strip()
