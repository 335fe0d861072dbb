"""Child processes: messages, every kind of death, the escalation of `stop`, and the death of the parent."""

import asyncio
import os
import pickle
import signal
import socket
import subprocess
import sys
import textwrap
import time
from bisect import bisect_right
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollbook.concurrency.child_process.child import HEARTBEAT_S, heartbeat
from rollbook.concurrency.child_process.frames import LENGTH_BYTES, BlockingFrames, Frames, frame, read_frame
from rollbook.concurrency.child_process.process import (
    BlockingChild,
    ChildEndedError,
    ChildProcess,
    ChildSpec,
    exit_reason,
    process_state,
)

REPOSITORY = Path(__file__).parents[3]
MODULE = "tests.parts.concurrency.child_main"


def spec(behaviour: str, **options: Any) -> ChildSpec:
    return ChildSpec(module=MODULE, arguments=(behaviour,), directory=REPOSITORY, **options)


@asynccontextmanager
async def child_of(behaviour: str, **options: Any) -> AsyncIterator[ChildProcess]:
    """A child that has sent its first message."""
    child = await ChildProcess.start(spec(behaviour, **options))
    try:
        assert await child.receive() == b"ready"
        yield child
    finally:
        await child.kill()


def is_gone(process: psutil.Process) -> bool:
    """A zombie that its parent has not reaped yet is dead too."""
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def wait_until_gone(process: psutil.Process) -> None:
    _, alive = psutil.wait_procs([process], timeout=30)
    assert all(is_gone(one) for one in alive)


async def test_messages_of_any_size_travel_both_ways_in_order() -> None:
    payloads = [b"", b"x", os.urandom(3_000_000), pickle.dumps({"a": [1, 2]})]
    async with child_of("echo") as child:
        for payload in payloads:
            child.send(payload)
        assert [await child.receive() for _ in payloads] == payloads


async def test_a_requested_stop_ends_the_child_gracefully() -> None:
    async with child_of("echo") as child:
        assert await child.stop(request=b"stop", grace_s=30)
        assert (child.exit_code, child.is_alive) == (0, False)


async def test_a_child_that_ignores_the_request_gets_sigterm() -> None:
    async with child_of("ignore_requests") as child:
        assert await child.stop(request=b"stop", grace_s=0.2)
        assert child.exit_reason == "was killed by signal 15 (SIGTERM)"


async def test_a_child_that_ignores_sigterm_is_killed() -> None:
    async with child_of("ignore_sigterm") as child:
        assert not await child.stop(grace_s=0.2)
        assert child.exit_reason == "was killed by signal 9 (SIGKILL)"


async def test_a_stopped_child_is_killed_and_its_state_is_reported(tmp_path: Path) -> None:
    async with child_of("wait", output=tmp_path / "output.txt") as child:
        os.kill(child.pid, signal.SIGSTOP)
        assert await child.stack() == "it does not respond (stopped by a signal)"
        assert not await child.stop(grace_s=0.2)
        assert child.exit_code == -signal.SIGKILL


async def test_a_killed_child_ends_the_wait_for_a_message() -> None:
    async with child_of("wait") as child:
        os.kill(child.pid, signal.SIGKILL)
        with pytest.raises(ChildEndedError, match=r"was killed by signal 9 \(SIGKILL\)"):
            await child.receive()


async def test_an_exit_is_reported_with_its_status_and_the_last_output() -> None:
    lines: list[tuple[int, str]] = []
    async with child_of("exit_3", output=lambda pid, line: lines.append((pid, line))) as child:
        with pytest.raises(ChildEndedError, match="exited with status 3"):
            await child.receive()
        await child.kill()
        assert child.last_output() == "first line\nlast line"
        assert lines == [(child.pid, "first line"), (child.pid, "last line")]


async def test_output_can_be_appended_to_a_file(tmp_path: Path) -> None:
    path = tmp_path / "output.txt"
    path.write_text("before\n")
    async with child_of("exit_3", output=path) as child:
        await child.ended()
        assert path.read_text() == "before\nfirst line\nlast line\n"
        assert child.last_output(1) == "last line"


@pytest.mark.parametrize("kind", ["file", "lines"])
async def test_a_running_child_writes_its_stacks_on_request(tmp_path: Path, kind: str) -> None:
    output = tmp_path / "output.txt" if kind == "file" else lambda pid, line: None
    async with child_of("wait", output=output) as child:
        assert f"{Path(MODULE.replace('.', '/')).name}.py" in await child.stack()


async def test_a_request_for_stacks_does_not_kill_a_child_that_is_still_importing(tmp_path: Path) -> None:
    (tmp_path / "slow_import.py").write_text("import time\nprint('importing', flush=True)\ntime.sleep(600)\n")
    importing = asyncio.Event()
    child = await ChildProcess.start(
        ChildSpec(
            module="slow_import",
            environment={**os.environ, "PYTHONPATH": str(tmp_path)},
            output=lambda pid, line: importing.set(),
        )
    )
    try:
        await importing.wait()
        assert "still importing" in await child.stack()
        assert child.is_alive
    finally:
        await child.kill()


async def test_half_a_frame_counts_as_the_end() -> None:
    async with child_of("half_a_frame") as child:
        with pytest.raises(ChildEndedError, match="exited with status 0"):
            await child.receive()


async def test_a_kill_ends_the_whole_process_group() -> None:
    async with child_of("grandchild", has_own_group=True) as child:
        grandchild = psutil.Process(int(await child.receive()))
        await child.kill()
        await asyncio.to_thread(wait_until_gone, grandchild)
        await child.kill()  # without effect the second time


async def test_a_child_that_has_ended_is_not_killed_again_because_another_process_may_have_its_pid(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with child_of("wait", has_own_group=True) as child:
        await child.kill()
        signalled: list[int] = []
        monkeypatch.setattr(os, "killpg", lambda group, number: signalled.append(group))
        child.send_kill()
        await child.kill()
    assert signalled == []


async def test_a_message_to_a_dead_child_has_no_effect() -> None:
    async with child_of("wait") as child:
        await child.kill()
        child.send(b"x")
        with pytest.raises(ChildEndedError):
            await child.receive()


async def test_a_module_that_does_not_exist_ends_the_wait_with_its_cause(tmp_path: Path) -> None:
    child = await ChildProcess.start(ChildSpec(module="no_such_module", output=tmp_path / "output.txt"))
    with pytest.raises(ChildEndedError, match="exited with status 1"):
        await child.receive()
    assert "No module named no_such_module" in child.last_output()
    await child.kill()


def test_a_blocking_child_receives_messages_and_ends_when_it_is_joined() -> None:
    child = BlockingChild(spec("echo"))
    child.send(os.urandom(1_000_000))
    child.send(b"stop")
    process = psutil.Process(child.pid)
    child.join(grace_s=0.2)
    assert is_gone(process)


def test_a_dead_blocking_child_refuses_messages_with_its_exit_reason() -> None:
    child = BlockingChild(spec("wait"))
    os.kill(child.pid, signal.SIGKILL)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    with pytest.raises(ChildEndedError, match="was killed by signal 9"):
        child.send(b"x")
    child.join(grace_s=30)


@pytest.mark.parametrize("behaviour", ["wait", "echo", "ignore_sigterm", "killed_with_parent"])
def test_a_child_ends_when_its_parent_is_killed(behaviour: str) -> None:
    code = textwrap.dedent(
        f"""
        import asyncio
        from tests.unit.concurrency.test_concurrency_child_process import child_of

        async def main():
            async with child_of({behaviour!r}, output=lambda pid, line: None) as child:
                print(child.pid, flush=True)
                await asyncio.sleep(3600)

        asyncio.run(main())
        """
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=REPOSITORY)
    assert parent.stdout is not None
    with parent:
        try:
            child = psutil.Process(int(parent.stdout.readline()))
        finally:
            parent.kill()
    wait_until_gone(child)


def test_a_process_that_watches_a_pipe_ends_when_the_pipe_is_closed_and_not_before() -> None:
    code = "import sys, time; from rollbook.concurrency.child_process.child import die_with_parent"
    code += "; die_with_parent(int(sys.argv[1])); print('watching', flush=True); sys.stdin.readline(); print('alive', flush=True)"
    read_end, write_end = os.pipe()
    command = [sys.executable, "-c", f"{code}; time.sleep(600)", str(read_end)]
    child = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY, pass_fds=(read_end,)
    )
    os.close(read_end)
    with child:
        try:
            assert child.stdout is not None
            assert child.stdin is not None
            assert child.stdout.readline() == "watching\n"
            child.stdin.write("\n")
            child.stdin.flush()
            assert child.stdout.readline() == "alive\n"
            os.close(write_end)
            assert child.wait(timeout=30) == -signal.SIGTERM
        finally:
            child.kill()


def test_a_frame_of_impossible_length_counts_as_the_end() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(b"\xff" * LENGTH_BYTES + b"garbage")
        assert BlockingFrames(ours).receive() is None


class OneByteSocket(socket.socket):
    """Receives one byte at a time, so that a message is split at every byte."""

    def recv_into(self, buffer: Any, nbytes: int = 0, flags: int = 0) -> int:
        return super().recv_into(buffer, 1, flags)


@given(payloads=st.lists(st.binary(max_size=30), max_size=5), data=st.data())
async def test_messages_that_arrive_byte_by_byte_and_end_anywhere_are_read_whole_or_not_at_all(
    payloads: list[bytes], data: st.DataObject
) -> None:
    stream = b"".join(frame(payload) for payload in payloads)
    received = stream[: data.draw(st.integers(0, len(stream)), label="bytes received")]
    ends = list(accumulate(LENGTH_BYTES + len(payload) for payload in payloads))
    expected = [*payloads[: bisect_right(ends, len(received))], None]

    reader = asyncio.StreamReader()
    reading = asyncio.create_task(_all_frames(reader))
    for byte in received:
        reader.feed_data(bytes([byte]))
        await asyncio.sleep(0)
    reader.feed_eof()
    assert await reading == expected

    ours, theirs = socket.socketpair()
    with OneByteSocket(fileno=ours.detach()) as slow, theirs:
        theirs.sendall(received)
        theirs.shutdown(socket.SHUT_WR)
        blocking = BlockingFrames(slow)
        assert [blocking.receive() for _ in expected] == expected


async def _all_frames(reader: asyncio.StreamReader) -> list[bytes | None]:
    found: list[bytes | None] = [b""]
    while found[-1] is not None:
        found.append(await read_frame(reader))
    return found[1:]


async def test_both_kinds_of_frames_understand_each_other() -> None:
    ours, theirs = socket.socketpair()
    frames, blocking = await Frames.open(ours), BlockingFrames(theirs)
    frames.send(b"to the thread")
    assert await asyncio.to_thread(blocking.receive) == b"to the thread"
    await asyncio.to_thread(blocking.send, b"to the loop")
    assert await frames.receive() == b"to the loop"
    theirs.sendall(frame(b"cut off")[:-1])
    blocking.close()
    assert await frames.receive() is None
    frames.close()


async def test_a_blocked_event_loop_reports_its_lag() -> None:
    lags: list[float] = []
    second = asyncio.Event()

    def beat(lag_s: float) -> None:
        lags.append(lag_s)
        if len(lags) == 2:
            second.set()

    beating = asyncio.create_task(heartbeat(beat))
    await asyncio.sleep(0)
    time.sleep(HEARTBEAT_S + 0.5)  # noqa: ASYNC251 - blocks the loop until the next heartbeat is overdue
    await second.wait()
    beating.cancel()
    assert lags[0] == 0.0
    assert lags[1] > 0.0


@pytest.mark.parametrize(
    ("code", "text"),
    [(None, "closed its connection"), (0, "exited with status 0"), (-15, "was killed by signal 15 (SIGTERM)")],
)
def test_exit_codes_are_put_into_words(code: int | None, text: str) -> None:
    assert exit_reason(code) == text


def test_the_state_of_a_process_that_does_not_exist_is_unknown() -> None:
    assert process_state(None) == "unknown"
