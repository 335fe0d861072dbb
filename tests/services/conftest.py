"""A process template for tests that start many processes of a run. Their imports would take longer than most of these tests."""

import asyncio
import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollbook.concurrency.child_process.frames import BlockingFrames
from rollbook.concurrency.child_process.process import ChildProcess, child_command
from rollbook.concurrency.child_process.template import TemplateConnection, template_environment, template_spec

WORKERS = ("rollbook.rollout.workers.main", "tests.parts.rollout.guessing")


@pytest.fixture(scope="module")
def template(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[socket.socket]:
    """The socket for requests of a template process, which has imported `FORKED` of the test module, or the modules of a worker."""
    modules = getattr(request.module, "FORKED", WORKERS)
    output = Path(tmp_path_factory.mktemp("template") / "output.txt")
    requests, theirs = socket.socketpair()
    channel, their_channel = socket.socketpair()
    with requests, channel, output.open("w") as written:
        with theirs, their_channel:
            process = subprocess.Popen(
                child_command(template_spec(modules, theirs, output=output), their_channel),
                env=template_environment(),
                pass_fds=(theirs.fileno(), their_channel.fileno()),
                stdout=written,
                stderr=written,
            )
        frames = BlockingFrames(channel)
        frames.send(",".join(modules).encode())
        assert frames.receive() == b"", output.read_text()
        yield requests
    process.kill()
    process.wait()


@pytest.fixture
def forked_processes(template: socket.socket, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fork the workers and roles that this process starts, as dispatchers and supervisors do. A template that hangs is not used."""
    connection = TemplateConnection(template.dup(), dict(os.environ) | template_environment(), lambda cause: None)
    monkeypatch.setattr(ChildProcess, "own_fork", staticmethod(connection.fork))
    yield
    asyncio.run(connection.close())
