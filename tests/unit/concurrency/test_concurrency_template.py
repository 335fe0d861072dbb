"""Process templates: a forked child is like a plainly started one, and the death of a template loses nothing."""

import asyncio
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from rollbook.concurrency.child_process.process import ChildEndedError, ChildProcess, ChildSpec, python_environment
from rollbook.concurrency.child_process.template import IS_SUPPORTED, EarlyTemplate, ProcessTemplate
from rollbook.concurrency.child_process.template_main import TEMPLATE_MODULE
from tests.parts.concurrency.processes import descendants_running
from tests.parts.concurrency.until import until

pytestmark = pytest.mark.skipif(not IS_SUPPORTED, reason="process templates need Linux")
REPOSITORY = Path(__file__).parents[3]
MODULE = "tests.parts.concurrency.child_main"
IMPORTED = "tests.parts.concurrency.imported_once"
READY_S = 60.0


class Events(list[str]):
    """The names of a template's events."""

    last_output = ""

    def __call__(self, event: str, fields: dict[str, object]) -> None:
        self.append(event)
        self.last_output = str(fields.get("last_output", ""))


@asynccontextmanager
async def running_template(
    tmp_path: Path, module: str = IMPORTED, events: Events | None = None, early: EarlyTemplate | None = None
) -> AsyncIterator[ProcessTemplate]:
    template = ProcessTemplate(
        [module], output=tmp_path / "template.txt", on_event=Events() if events is None else events, early=early
    )
    running = asyncio.create_task(template.run())
    try:
        await asyncio.sleep(0)
        await template.until_ready(READY_S)
        yield template
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running


def spec(tmp_path: Path, behaviour: str, *arguments: str, **options: Any) -> ChildSpec:
    return ChildSpec(module=MODULE, arguments=(behaviour, *arguments), output=tmp_path / "output.txt", **options)


@asynccontextmanager
async def child_of(template: ProcessTemplate, command: ChildSpec) -> AsyncIterator[ChildProcess]:
    """A child that has sent its first message."""
    child = await ChildProcess.start(command, fork=template.fork)
    try:
        assert await child.receive() == b"ready"
        yield child
    finally:
        await child.kill()


async def facts_of(child: ChildProcess) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads(await child.receive())
    return facts


async def test_a_forked_child_has_the_settings_of_its_spec_and_us_as_its_parent(tmp_path: Path) -> None:
    options = {"environment": {**python_environment(), "CHILD_VARIABLE": "value"}, "directory": tmp_path}
    async with (
        running_template(tmp_path) as template,
        child_of(template, spec(tmp_path, "facts", "-x", "two words", has_own_group=True, **options)) as child,
    ):
        facts = await facts_of(child)
        assert facts.pop("random")
        assert facts == {
            "pid": child.pid,
            "parent": os.getpid(),
            "group": child.pid,
            "directory": str(tmp_path),
            "variable": "value",
            "arguments": ["facts", "-x", "two words"],
            "is_main": True,
            "was_forked": True,
            "ignores_interrupts": False,
            "threads": 1,
            "files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        }
        command = psutil.Process(child.pid).cmdline()
        assert command[:4] == [sys.executable, "-P", "-m", MODULE]
        assert command[5:8] == ["facts", "-x", "two words"]
        child.send(b"a message")
        assert await child.receive() == b"a message"


async def test_an_inherited_descriptor_keeps_its_number_and_its_file(tmp_path: Path) -> None:
    async with running_template(tmp_path) as template:
        reader, writer = os.pipe()
        command = spec(tmp_path, "write_to_descriptor", str(writer), inherited_fds=[writer])
        async with child_of(template, command) as child:
            os.close(writer)
            assert await child.ended() == 0
            # The end of the pipe shows that neither the template nor another process holds it.
            assert os.read(reader, 100) == b"written by the child"
            assert os.read(reader, 100) == b""
            os.close(reader)


async def test_siblings_have_different_random_numbers(tmp_path: Path) -> None:
    async with (
        running_template(tmp_path) as template,
        child_of(template, spec(tmp_path, "facts")) as one,
        child_of(template, spec(tmp_path, "facts")) as other,
    ):
        numbers = [number for child in (one, other) for number in (await facts_of(child))["random"]]
        assert len(set(numbers)) == 4


async def test_an_exit_is_reported_with_its_status_and_the_last_output(tmp_path: Path) -> None:
    async with running_template(tmp_path) as template, child_of(template, spec(tmp_path, "exit_3")) as child:
        with pytest.raises(ChildEndedError, match="exited with status 3"):
            await child.receive()
        assert child.last_output() == "first line\nlast line"
        assert not psutil.pid_exists(child.pid)


async def test_children_outlive_a_killed_template_and_report_their_exit(tmp_path: Path) -> None:
    async with (
        running_template(tmp_path) as template,
        child_of(template, spec(tmp_path, "facts")) as one,
        child_of(template, spec(tmp_path, "wait")) as other,
    ):
        facts = await facts_of(one)
        assert (facts["was_forked"], facts["group"]) == (True, os.getpgrp())
        await _kill(template)
        one.send(b"still here")
        assert await one.receive() == b"still here"
        one.send(b"stop")
        assert await one.ended() == 0
        os.kill(other.pid, signal.SIGABRT)
        assert await other.ended() == -signal.SIGABRT


async def test_after_the_death_of_a_template_children_start_plainly_until_there_is_a_new_one(tmp_path: Path) -> None:
    async with running_template(tmp_path) as template:
        before = template.pid
        await _kill(template)
        async with child_of(template, spec(tmp_path, "facts")) as child:
            assert not (await facts_of(child))["was_forked"]
        await until(lambda: template.pid not in (None, before))
        await template.until_ready(READY_S)
        async with child_of(template, spec(tmp_path, "facts")) as child:
            assert (await facts_of(child))["was_forked"]


async def test_a_template_that_was_started_early_forks_and_is_replaced_when_it_dies(tmp_path: Path) -> None:
    """It learns what to import, and how many files it may open, when it is taken over."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft - 1, hard))
    early = EarlyTemplate(["json"])
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    with closing(early):
        async with running_template(tmp_path, early=early) as template:
            before = template.pid
            async with child_of(template, spec(tmp_path, "facts")) as child:
                facts = await facts_of(child)
                assert (facts["was_forked"], facts["parent"], facts["files"]) == (True, os.getpid(), soft)
            await _kill(template)
            await until(lambda: template.pid not in (None, before))
            await template.until_ready(READY_S)
            async with child_of(template, spec(tmp_path, "facts")) as child:
                assert (await facts_of(child))["was_forked"]
    assert descendants_running(TEMPLATE_MODULE, of=os.getpid()) == []


async def test_the_output_of_a_template_that_was_started_early_explains_its_death(tmp_path: Path) -> None:
    events = Events()
    with closing(EarlyTemplate(["no_such_module"])) as early:
        async with running_template(tmp_path, "no_such_module", events, early):
            assert events == ["template.died"]
            assert "No module named 'no_such_module'" in events.last_output


def test_a_template_that_was_started_early_ends_if_no_run_begins() -> None:
    with closing(EarlyTemplate([IMPORTED])):
        assert len(descendants_running(TEMPLATE_MODULE, of=os.getpid())) == 1
    assert descendants_running(TEMPLATE_MODULE, of=os.getpid()) == []


async def test_a_template_that_dies_during_a_request_leaves_one_plainly_started_child(tmp_path: Path) -> None:
    async with running_template(tmp_path) as template:
        assert template.pid is not None
        os.kill(template.pid, signal.SIGSTOP)
        starting = asyncio.create_task(ChildProcess.start(spec(tmp_path, "facts"), fork=template.fork))
        await asyncio.sleep(0.1)
        assert not starting.done()
        os.kill(template.pid, signal.SIGKILL)
        child = await starting
        assert await child.receive() == b"ready"
        assert not (await facts_of(child))["was_forked"]
        assert await child.stop(request=b"stop", grace_s=30)
        assert descendants_running(MODULE) == []


async def test_a_template_that_does_not_respond_is_killed_and_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollbook.concurrency.child_process.template.FORK_S", 0.3)
    events = Events()
    async with running_template(tmp_path, events=events) as template:
        stopped = template.pid
        assert stopped is not None
        os.kill(stopped, signal.SIGSTOP)
        async with child_of(template, spec(tmp_path, "facts")) as child:
            assert not (await facts_of(child))["was_forked"]
        await until(lambda: events.count("template.ready") == 2)
        assert "template.silent" in events
        assert not psutil.pid_exists(stopped)


async def test_a_forked_child_without_permission_to_run_runs_nothing(tmp_path: Path) -> None:
    """The request is cancelled while the template cannot respond. It forks later, and the child exits at once."""
    async with running_template(tmp_path) as template:
        assert template.pid is not None
        os.kill(template.pid, signal.SIGSTOP)
        starting = asyncio.create_task(ChildProcess.start(spec(tmp_path, "wait"), fork=template.fork))
        await asyncio.sleep(0.1)
        starting.cancel()
        os.kill(template.pid, signal.SIGCONT)
        with pytest.raises(asyncio.CancelledError):
            await starting
        await until(lambda: descendants_running(MODULE) == [])
        assert (tmp_path / "output.txt").read_text() == ""
        # The template still serves.
        async with child_of(template, spec(tmp_path, "facts")) as child:
            assert (await facts_of(child))["was_forked"]


async def test_a_directory_that_does_not_exist_fails_as_in_a_plain_start(tmp_path: Path) -> None:
    async with running_template(tmp_path) as template:
        with pytest.raises(FileNotFoundError):
            await ChildProcess.start(spec(tmp_path, "wait", directory=tmp_path / "absent"), fork=template.fork)
        async with child_of(template, spec(tmp_path, "facts")) as child:
            assert (await facts_of(child))["was_forked"]


async def test_a_child_with_another_python_path_is_started_plainly(tmp_path: Path) -> None:
    environment = {**python_environment(), "PYTHONPATH": f"{REPOSITORY}{os.pathsep}{tmp_path}"}
    async with (
        running_template(tmp_path) as template,
        child_of(template, spec(tmp_path, "facts", environment=environment)) as child,
    ):
        assert not (await facts_of(child))["was_forked"]


@pytest.mark.parametrize(
    ("module", "event"), [("tests.parts.concurrency.starts_a_thread", "unusable"), ("no_such_module", "died")]
)
async def test_a_template_that_cannot_fork_ends_and_children_start_plainly(
    tmp_path: Path, module: str, event: str
) -> None:
    events = Events()
    async with running_template(tmp_path, module, events) as template:
        assert events == [f"template.{event}"]
        async with child_of(template, spec(tmp_path, "facts")) as child:
            assert not (await facts_of(child))["was_forked"]
        assert template.pid is None


async def test_output_lines_of_a_forked_child_are_passed_on(tmp_path: Path) -> None:
    lines: list[tuple[int, str]] = []
    command = ChildSpec(module=MODULE, arguments=["exit_3"], output=lambda pid, line: lines.append((pid, line)))
    async with running_template(tmp_path) as template, child_of(template, command) as child:
        assert await child.ended() == 3
        await child.kill()
        assert lines == [(child.pid, "first line"), (child.pid, "last line")]


async def test_a_forked_child_has_its_own_template_that_ends_with_it(tmp_path: Path) -> None:
    """The child starts a grandchild: forked while its template lives, plainly after that was killed."""
    ours, theirs = socket.socketpair()
    command = spec(
        tmp_path, "start_children", str(ours.fileno()), inherited_fds=[ours.fileno()], template_fd=theirs.fileno()
    )
    async with running_template(tmp_path) as template, child_of(template, command) as child:
        for end in (ours, theirs):
            end.close()
        forked = await facts_of(child)
        assert (forked["parent"], forked["was_forked"]) == (child.pid, True)
        (own,) = descendants_running(TEMPLATE_MODULE, of=child.pid)
        own.kill()
        child.send(b"again")
        plain = await facts_of(child)
        assert (plain["parent"], plain["was_forked"]) == (child.pid, False)


async def test_the_own_template_of_a_child_ends_when_the_child_is_killed(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    command = spec(tmp_path, "wait", inherited_fds=[ours.fileno()], template_fd=theirs.fileno())
    async with running_template(tmp_path) as template, child_of(template, command) as child:
        for end in (ours, theirs):
            end.close()
        (own,) = descendants_running(TEMPLATE_MODULE, of=child.pid)
        await child.kill()
        await until(lambda: not own.is_running() or own.status() == psutil.STATUS_ZOMBIE)
        assert template.pid is not None, "the template of the run lives on"


async def test_after_a_plain_start_a_child_without_its_own_template_starts_children_plainly(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    command = spec(
        tmp_path, "start_children", str(ours.fileno()), inherited_fds=[ours.fileno()], template_fd=theirs.fileno()
    )
    child = await ChildProcess.start(command)
    try:
        for end in (ours, theirs):
            end.close()
        assert await child.receive() == b"ready"
        assert not (await facts_of(child))["was_forked"]
    finally:
        await child.kill()


def test_a_template_and_its_children_end_with_their_parent(tmp_path: Path) -> None:
    code = textwrap.dedent(
        """
        import asyncio, sys
        from pathlib import Path
        from tests.unit.concurrency.test_concurrency_template import child_of, running_template, spec

        async def main(path):
            async with running_template(path) as template, child_of(template, spec(path, "wait")) as child:
                print(template.pid, child.pid, flush=True)
                await asyncio.sleep(3600)

        asyncio.run(main(Path(sys.argv[1])))
        """
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY)
    assert parent.stdout is not None
    with parent:
        try:
            processes = [psutil.Process(int(pid)) for pid in parent.stdout.readline().split()]
        finally:
            parent.kill()
    _, alive = psutil.wait_procs(processes, timeout=30)
    assert [process for process in alive if process.status() != psutil.STATUS_ZOMBIE] == []


async def _kill(template: ProcessTemplate) -> None:
    assert template.pid is not None
    os.kill(template.pid, signal.SIGKILL)
    await until(lambda: template.pid is None)
