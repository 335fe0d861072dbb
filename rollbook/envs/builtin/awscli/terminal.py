"""The AWS CLI inside the worker's process: kept warm, its output caught and bounded, and the same for every command.

A CLI driver is made for one command: parts of it remember the one before (a region, the validators of another operation), and what
they remember breaks the next. So plain operations of an API are played here with a driver whose memory is undone after each, as
are words that name none and are refused at once; everything else (file transfers, waiters, help, options that stick) is played with
a driver nobody used, in a fork of this process.
"""

import io
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

# Options that are set on the driver's session and stay there. argparse accepts every unambiguous beginning of a name.
STICKY = (
    "--reg",
    "--prof",
    "--deb",
    "--ca-b",
    "--no-v",
    "--cli-",
    "--no-s",
    "--col",
    "--end",
    "--out",
    "--que",
    "--no-p",
)
NOTICE = "Note: AWS CLI version 2, the latest major version of the AWS CLI, is now stable"


class Bounded(io.BytesIO):
    """Keeps the first `limit` bytes and counts the rest: an endless output costs no memory."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit
        self.dropped = 0

    def write(self, data: Any) -> int:
        size = len(data)
        room = max(0, self.limit - self.tell())
        self.dropped += max(0, size - room)
        super().write(data[:room])
        return size

    def text(self) -> str:
        return self.getvalue().decode("utf-8", errors="replace")


class PlainHelp:
    """Prints help as it was written; a pager would be another program."""

    def render(self, contents: bytes) -> None:
        sys.stdout.write(contents.decode("utf-8", errors="replace"))


class NotingEmitter(HierarchicalEmitter):  # type: ignore[misc]  # its base has no types
    """A session's emitter of events that can tell what a command registered, and undo it.

    Clients are given copies of it; only the original notes. A unique handler that is registered again changes nothing, and undoing
    that would take the first away, so it is not noted.
    """

    original: "NotingEmitter | None" = None
    noted: ClassVar[list[tuple[Any, ...]]] = []

    @contextmanager
    def one_command(self) -> Iterator[None]:
        NotingEmitter.original = self
        try:
            yield
        finally:
            NotingEmitter.original = None
            while self.noted:
                event, handler, unique_id, counts_uses = self.noted.pop()
                self.unregister(event, handler, unique_id=unique_id, unique_id_uses_count=counts_uses)

    def _register_section(
        self, event_name: str, handler: Any, unique_id: Any, unique_id_uses_count: bool, section: Any
    ) -> None:
        is_known = unique_id is not None and unique_id in self._unique_id_handlers
        if self is NotingEmitter.original and (unique_id_uses_count or not is_known):
            self.noted.append((event_name, handler, unique_id, unique_id_uses_count))
        super()._register_section(event_name, handler, unique_id, unique_id_uses_count, section)


class Terminal:
    """One agent's command line. `endpoint` is appended to every command; None leaves the CLI's own."""

    def __init__(self, *, endpoint: str | None, max_output_bytes: int, read_s: float) -> None:
        self._max_output_bytes = max_output_bytes
        self._appended = [] if endpoint is None else ["--endpoint-url", endpoint]
        self._appended += ["--cli-connect-timeout", "5", "--cli-read-timeout", str(max(1, round(read_s)))]
        # `file://`, `fileb://` and `http://` before a parameter's value would read from this machine.
        awscli.paramfile.LOCAL_PREFIX_MAP.clear()
        awscli.paramfile.REMOTE_PREFIX_MAP.clear()
        awscli.help.get_renderer = PlainHelp
        sys.argv = ["aws"]
        self._unused: Any = None
        self._warm = create_clidriver()
        self._commands = self._warm._get_command_table()
        self._events = self._warm.session.get_component("event_emitter")._emitter
        self._events.__class__ = NotingEmitter

    @property
    def loader(self) -> Any:
        """Reads and keeps the descriptions of services; shared with whoever asks the API directly."""
        return self._warm.session.get_component("data_loader")

    def play(self, argv: list[str]) -> dict[str, Any] | None:
        """One command line, without the leading `aws`. None when it must be played in a fork, with `play_once`."""
        operation = self._plain_operation(argv)
        if operation is None and not self._is_misspelt(argv):
            self._prepare_unused()
            return None
        try:
            with self._events.one_command():
                return self._caught(self._warm, [*argv, *self._appended])
        finally:
            if operation is not None:
                # Its arguments are worked out again next time, together with what that registers.
                operation._arg_table = None

    def rehearse(self) -> None:
        """Play a harmless command: what is imported, compiled and registered once in a session's life is there afterwards."""
        self._caught(self._warm, ["sts", "get-caller-identity", *self._appended])

    def play_once(self, argv: list[str]) -> dict[str, Any]:
        """The same with a driver that nobody used; for a process that ends afterwards."""
        return self._caught(self._unused, argv if argv[-1:] == ["help"] else [*argv, *self._appended])

    def _prepare_unused(self) -> None:
        """Made once, here, so that every fork finds it; many sessions never need it."""
        if self._unused is None:
            self._unused = create_clidriver()
            self._unused.session.register_component("data_loader", self.loader)

    def _plain_operation(self, argv: list[str]) -> Any:
        """The operation of an API that a command line is about, if it is that and nothing else."""
        if len(argv) < 2 or "help" in argv or any(word.startswith(STICKY) for word in argv):
            return None
        service = self._commands.get(argv[0])
        if type(service) is not ServiceCommand:
            return None
        operation = service._get_command_table().get(argv[1])
        return operation if type(operation) is ServiceOperation else None

    def _is_misspelt(self, argv: list[str]) -> bool:
        """Names a service or an operation that does not exist, as agents that learn often do. It is refused while it is parsed,
        before a driver remembers anything, so it needs no fork, which costs four times as much as a command."""
        if not argv or argv[0].startswith("-") or "help" in argv or any(word.startswith(STICKY) for word in argv):
            return False
        service = self._commands.get(argv[0])
        if service is None:
            return True
        if type(service) is not ServiceCommand or len(argv) < 2 or argv[1].startswith("-"):
            return False
        return argv[1] not in service._get_command_table()

    def _caught(self, driver: Any, argv: list[str]) -> dict[str, Any]:
        out, err = Bounded(self._max_output_bytes), Bounded(self._max_output_bytes)
        with (
            io.TextIOWrapper(out, encoding="utf-8", write_through=True) as out_text,
            io.TextIOWrapper(err, encoding="utf-8", write_through=True) as err_text,
        ):
            with redirect_stdout(out_text), redirect_stderr(err_text):
                rc = _exit_code(driver, argv)
            texts = {"stdout": out.text(), "stderr": _without_notice(err.text())}
        return {"rc": rc, **texts, "dropped_bytes": out.dropped + err.dropped}


def _exit_code(driver: Any, argv: list[str]) -> int:
    try:
        return int(driver.main(argv) or 0)
    except SystemExit as ended:  # wrong usage
        return ended.code if isinstance(ended.code, int) else 2
    except Exception as error:  # the agent's words can break any corner of the CLI, and it must hear how
        sys.stderr.write(f"\naws: {type(error).__name__}: {error}\n")
        return 255


def _without_notice(text: str) -> str:
    return "\n".join(line for line in text.splitlines() if NOTICE not in line).strip()
