"""Connections between trainer ranks: only ranks with the token join, and a lost rank is noticed."""

import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import psutil
import pytest

from rollbook.trainer.distributed.links import MAX_UNKNOWN, Invitation, Link, RankListener, connect, interface_of

WAIT_S = 60.0
REPOSITORY = Path(__file__).parents[3]


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[RankListener]:
    with closing(RankListener("127.0.0.1", tmp_path / "ranks.json")) as made:
        yield made


@pytest.fixture
def invitation(listener: RankListener, tmp_path: Path) -> Invitation:
    found = Invitation.read(tmp_path / "ranks.json")
    assert found is not None
    assert (tmp_path / "ranks.json").stat().st_mode & 0o077 == 0
    return found


def joined(listener: RankListener) -> socket.socket:
    sock = listener.joined(WAIT_S)
    assert sock is not None
    return sock


def test_calls_reach_the_rank_in_order(listener: RankListener, invitation: Invitation) -> None:
    rank = connect(invitation, lambda cause: None)
    leader = Link(joined(listener), lambda cause: None)
    with closing(rank), closing(leader):
        for call in (b"one", b"two"):
            leader.send(call)
        assert [rank.receive(), rank.receive()] == [b"one", b"two"]


@pytest.mark.parametrize("hello", [b"", b"GET / HTTP/1.1\r\n\r\n", b"0" * 64])
def test_a_peer_without_the_token_gets_no_byte_and_is_disconnected(
    listener: RankListener, invitation: Invitation, hello: bytes
) -> None:
    with socket.create_connection((invitation.host, invitation.port), timeout=WAIT_S) as peer:
        peer.sendall(hello)
        peer.shutdown(socket.SHUT_WR)
        with suppress(ConnectionError):  # a reset, if it did not read all that was sent
            assert peer.recv(1) == b""
    assert listener.joined(0.0) is None


def test_a_flood_of_connections_without_the_token_costs_few_threads_and_the_next_rank_joins(
    listener: RankListener, invitation: Invitation
) -> None:
    address, before = (invitation.host, invitation.port), threading.active_count()
    with ExitStack() as flood:
        for _ in range(2 * MAX_UNKNOWN):
            flood.enter_context(socket.create_connection(address, timeout=WAIT_S))
        with socket.create_connection(address, timeout=WAIT_S) as last, suppress(ConnectionError):
            # Its end shows that the listener has accepted the others.
            last.sendall(b"0" * 64)
            assert last.recv(1) == b""
        assert threading.active_count() <= before + MAX_UNKNOWN
    with closing(connect(invitation, lambda cause: None)), closing(joined(listener)):
        pass


# Rank 0 of a process that may open few files.
FEW_FILES = """
import resource, sys
from pathlib import Path
from rollbook.trainer.distributed.links import RankListener
resource.setrlimit(resource.RLIMIT_NOFILE, (40, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
listener = RankListener("127.0.0.1", Path(sys.argv[1]))
print("ready", flush=True)
print("joined" if listener.joined(60.0) else "lost", flush=True)
"""


def test_a_rank_joins_after_a_flood_that_left_no_file_to_open(tmp_path: Path) -> None:
    command = [sys.executable, "-c", FEW_FILES, str(tmp_path / "ranks.json")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY) as leader:
        assert leader.stdout is not None
        try:
            assert leader.stdout.readline() == "ready\n"
            invitation = Invitation.read(tmp_path / "ranks.json")
            assert invitation is not None
            with ExitStack() as flood:
                for _ in range(60):
                    flood.enter_context(socket.create_connection((invitation.host, invitation.port), timeout=WAIT_S))
                until = time.monotonic() + WAIT_S
                while psutil.Process(leader.pid).num_fds() < 40 and time.monotonic() < until:
                    time.sleep(0.05)
                assert psutil.Process(leader.pid).num_fds() == 40
            with closing(connect(invitation, lambda cause: None)):
                assert leader.stdout.readline() == "joined\n"
        finally:
            leader.kill()


def test_a_rank_that_closes_its_connection_is_lost(listener: RankListener, invitation: Invitation) -> None:
    lost: queue.SimpleQueue[str] = queue.SimpleQueue()
    rank = connect(invitation, lambda cause: None)
    with closing(Link(joined(listener), lost.put)):
        rank.close()
        assert lost.get(timeout=WAIT_S) == "closed its connection"


def test_a_rank_that_ends_after_the_last_message_is_not_lost(listener: RankListener, invitation: Invitation) -> None:
    lost: queue.SimpleQueue[str] = queue.SimpleQueue()
    rank = connect(invitation, lost.put)
    with closing(Link(joined(listener), lost.put)) as leader:
        leader.send_last(b"stop")
        assert rank.receive() == b"stop"
        rank.close()
        leader.wait_closed(WAIT_S)
    assert lost.empty()


def test_a_silent_rank_is_lost(listener: RankListener, invitation: Invitation) -> None:
    lost: queue.SimpleQueue[str] = queue.SimpleQueue()
    with socket.create_connection((invitation.host, invitation.port)) as rank:
        rank.sendall(invitation.token.encode())
        with closing(Link(joined(listener), lost.put, silence_s=1)):
            assert lost.get(timeout=WAIT_S) == "sent no heartbeat for 1 s"


def test_the_invitation_is_removed_with_the_listener(tmp_path: Path) -> None:
    listener = RankListener("127.0.0.1", tmp_path / "ranks.json")
    found = Invitation.read(tmp_path / "ranks.json")
    listener.close()
    assert found is not None
    assert Invitation.read(tmp_path / "ranks.json") is None
    with pytest.raises(OSError):
        connect(found, lambda cause: None)


def test_the_interface_of_an_address_is_found() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("192.0.2.1") is None
