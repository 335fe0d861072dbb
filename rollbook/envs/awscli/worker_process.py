"""The worker's own process: the AWS CLI kept warm, one command after the other, never a shell.

Its parent runs it as `python -m rollbook.envs.awscli.worker_process SETTINGS` and speaks JSON lines on stdin and stdout. Two verbs:
`run` plays one command line of the agent; `calls` asks the API directly, for set-up checks and grading, where no agent can listen.
The command's own stdout and stderr are caught and bounded. The endpoint is appended last to every command, file and URL prefixes of
parameters are off, and the confinement refuses every file outside the scratch directory, every program and every other address.
"""

import base64
import datetime
import io
import json
import os
import sys
import tempfile
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import awscli.help  # type: ignore[import-untyped]  # the package ships no types; the same holds for the lines below
import awscli.paramfile  # type: ignore[import-untyped]
from awscli.clidriver import create_clidriver  # type: ignore[import-untyped]
from botocore.config import Config  # type: ignore[import-untyped]
from botocore.exceptions import (  # type: ignore[import-untyped]
    BotoCoreError,
    ClientError,
    HTTPClientError,
    ParamValidationError,
)
from botocore.session import Session  # type: ignore[import-untyped]

from rollbook.envs.sandboxes.confinement import Reach, confine, enter, interpreter_roots

MEMORY_BYTES = 4 * 2**30
FILE_BYTES = 64 * 2**20
# Set on the driver's session when they appear, and kept there for later commands: such a driver is used once.
STICKY = ("--reg", "--prof", "--deb", "--ca-b", "--no-v", "--cli-", "--no-s", "--col")
# A body that grading looks at is a small file; more of it is not read.
BODY_BYTES = 2**18
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


class Terminal:
    """One agent's command line."""

    def __init__(self, *, endpoint: str | None, max_output_bytes: int) -> None:
        self._endpoint = endpoint
        self._max_output_bytes = max_output_bytes
        self._loader: Any = None
        self._driver = self._fresh_driver()
        self._session = Session()
        self._session.register_component("data_loader", self._loader)
        self._clients: dict[tuple[str, str | None], Any] = {}

    def run(self, argv: list[str]) -> dict[str, Any]:
        """One command line, without the leading `aws`."""
        out, err = Bounded(self._max_output_bytes), Bounded(self._max_output_bytes)
        with (
            io.TextIOWrapper(out, encoding="utf-8", write_through=True) as out_text,
            io.TextIOWrapper(err, encoding="utf-8", write_through=True) as err_text,
        ):
            with redirect_stdout(out_text), redirect_stderr(err_text):
                rc = self._main(argv)
            reply = {"rc": rc, "stdout": out.text(), "stderr": _without_notice(err.text())}
        if any(argument.startswith(STICKY) for argument in argv):
            self._driver = self._fresh_driver()
        return reply | {"dropped_bytes": out.dropped + err.dropped}

    def calls(self, calls: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [self._call(**call) for call in calls]

    def _main(self, argv: list[str]) -> int:
        endpoint = [] if self._endpoint is None or argv[-1:] == ["help"] else ["--endpoint-url", self._endpoint]
        try:
            return int(self._driver.main([*argv, *endpoint]) or 0)
        except SystemExit as ended:  # wrong usage
            return ended.code if isinstance(ended.code, int) else 2
        except Exception as error:  # the agent's words can break any corner of the CLI; the next command must still run
            sys.stderr.write(f"\naws: {type(error).__name__}: {error}\n")
            return 255

    def _call(
        self, *, service: str, operation: str, params: dict[str, Any], region: str | None = None
    ) -> dict[str, Any]:
        try:
            client = self._clients.get((service, region))
            if client is None:
                client = self._session.create_client(
                    service,
                    region_name=region,
                    endpoint_url=self._endpoint,
                    config=Config(
                        retries={"max_attempts": 0}, connect_timeout=5, read_timeout=15, parameter_validation=True
                    ),
                )
                self._clients[service, region] = client
            return {"result": _plain(getattr(client, operation)(**params))}
        except ClientError as error:
            return {"code": error.response["Error"].get("Code", ""), "message": str(error)}
        except HTTPClientError as error:
            return {"unreachable": str(error)}
        except (ParamValidationError, BotoCoreError, AttributeError, TypeError) as error:
            return {"invalid": f"{service}.{operation}: {type(error).__name__}: {error}"}

    def _fresh_driver(self) -> Any:
        driver = create_clidriver()
        if self._loader is None:
            self._loader = driver.session.get_component("data_loader")
        else:  # the models of services that were used are read once
            driver.session.register_component("data_loader", self._loader)
        return driver


def _without_notice(text: str) -> str:
    return "\n".join(line for line in text.splitlines() if NOTICE not in line).strip()


def _plain(value: Any) -> Any:
    """What the API answered, as JSON can say it."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items() if key != "ResponseMetadata"}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, datetime.datetime):
        return value.isoformat()
    if hasattr(value, "read"):
        value = value.read(BODY_BYTES)
    if isinstance(value, bytes | bytearray):
        try:
            return bytes(value).decode("utf-8")
        except UnicodeDecodeError:
            return base64.b64encode(bytes(value)).decode("ascii")
    return value


def main() -> None:
    settings = json.loads(sys.argv[1])
    enter(settings, memory_bytes=MEMORY_BYTES, file_bytes=FILE_BYTES)
    scratch = Path(settings["scratch"])
    os.chdir(scratch)
    tempfile.tempdir = str(scratch)
    sys.argv = ["aws"]
    awscli.paramfile.LOCAL_PREFIX_MAP.clear()
    awscli.paramfile.REMOTE_PREFIX_MAP.clear()
    awscli.help.get_renderer = PlainHelp
    terminal = Terminal(endpoint=settings["endpoint"], max_output_bytes=int(settings["max_output_bytes"]))
    commands, replies = sys.stdin.buffer, sys.stdout.buffer
    # What the CLI reads from its stdin is empty; the channel is ours alone.
    sys.stdin = io.TextIOWrapper(io.BytesIO())
    if settings["endpoint"] is not None:
        ports = frozenset({int(settings["endpoint"].rpartition(":")[2])})
        confine(Reach(writable=(str(scratch),), readable=interpreter_roots(), ports=ports))
    else:
        confine(Reach(writable=(str(scratch),), readable=interpreter_roots(), is_online=True))
    replies.write(b'{"ready": true}\n')
    replies.flush()
    for line in commands:
        message = json.loads(line)
        reply: Any = terminal.run(message["run"]) if "run" in message else {"answers": terminal.calls(message["calls"])}
        replies.write(json.dumps(reply).encode() + b"\n")
        replies.flush()


if __name__ == "__main__":
    main()
