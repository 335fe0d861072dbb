"""Connections between trainer ranks: only ranks with the token join, and a lost rank is noticed."""

import queue
import socket
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest

from rollbook.trainer.distributed.links import Invitation, Link, RankListener, connect, interface_of

WAIT_S = 60.0


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
