"""Connections between trainer ranks: both ends prove that they know the token, no message can run code, a lost rank is noticed."""

import hmac
import os
import pickle
import queue
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from dataclasses import asdict
from pathlib import Path

import numpy as np
import psutil
import pytest

from rollbook.contracts.group import GroupId
from rollbook.trainer.data.passes import Microbatch, RowSource
from rollbook.trainer.data.prefixes import PackedSequences
from rollbook.trainer.distributed import links
from rollbook.trainer.distributed.calls import InvalidCallError, decode_call, encode_call, read_passes
from rollbook.trainer.distributed.links import (
    FOLLOWER,
    HELLO,
    MAX_UNKNOWN,
    FalsePeerError,
    Invitation,
    Link,
    RankListener,
    connect,
    interface_of,
)

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
        greet(rank, invitation)
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


def proof_of(token: str, about: bytes, *nonces: bytes) -> bytes:
    return hmac.digest(token.encode(), about + b"".join(nonces), "sha256")


def greet(sock: socket.socket, invitation: Invitation) -> None:
    """What a rank sends and receives before the first frame."""
    nonce = b"n" * 32
    sock.sendall(nonce + proof_of(invitation.token, HELLO, nonce))
    theirs = sock.recv(64, socket.MSG_WAITALL)[:32]
    sock.sendall(proof_of(invitation.token, FOLLOWER, nonce, theirs))


class Bomb:
    """A pickle that would create a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[object, ...]:
        return (Path.touch, (self._path,))


@pytest.mark.parametrize("knows_hello", [False, True])
def test_a_follower_refuses_a_false_rank_0_and_runs_nothing_that_it_sends(tmp_path: Path, knows_hello: bool) -> None:
    """`ranks.json` outlives rank 0, and another user of the machine may then listen on its port."""
    received: list[bytes] = []
    bomb = pickle.dumps(Bomb(tmp_path / "executed"))

    def serve(server: socket.socket) -> None:
        sock, _ = server.accept()
        with sock, suppress(OSError):
            received.append(sock.recv(4096))
            nonce = b"n" * 32
            # Without the token it can only repeat what it has seen.
            answer = received[0][32:] if knows_hello else b"0" * 32
            sock.sendall(nonce + answer + len(bomb).to_bytes(8, "big") + bomb)
            received.append(sock.recv(4096))

    with socket.create_server(("127.0.0.1", 0)) as server:
        false_leader = threading.Thread(target=serve, args=[server], daemon=True)
        false_leader.start()
        invitation = Invitation(host="127.0.0.1", port=server.getsockname()[1], token="t" * 64)
        with pytest.raises(FalsePeerError, match="is not rank 0"):
            connect(invitation, lambda cause: None)
        false_leader.join(WAIT_S)
    assert b"t" * 8 not in b"".join(received), "the token itself is never sent"
    assert received[1:] in ([], [b""]), "no proof follows a false one"
    assert not (tmp_path / "executed").exists()


def test_a_recorded_greeting_does_not_open_the_next_connection(listener: RankListener, invitation: Invitation) -> None:
    nonce = b"n" * 32
    hello = nonce + proof_of(invitation.token, HELLO, nonce)
    with socket.create_connection((invitation.host, invitation.port), timeout=WAIT_S) as peer:
        peer.sendall(hello)
        answer = peer.recv(64, socket.MSG_WAITALL)
        recorded = proof_of(invitation.token, FOLLOWER, nonce, answer[:32])
        peer.sendall(recorded)
        joined(listener).close()
    with socket.create_connection((invitation.host, invitation.port), timeout=WAIT_S) as peer:
        peer.sendall(hello)
        assert peer.recv(64, socket.MSG_WAITALL)[:32] != answer[:32]
        peer.sendall(recorded)
        with suppress(ConnectionError):
            assert peer.recv(1) == b""
    assert listener.joined(0.0) is None


def test_a_rank_that_is_no_program_of_ours_is_given_up_after_the_greeting_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(links, "HELLO_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        invitation = Invitation(host="127.0.0.1", port=silent.getsockname()[1], token="t" * 64)
        with pytest.raises(FalsePeerError, match="sent no proof within"):
            connect(invitation, lambda cause: None)


def test_the_invitation_is_private_even_if_a_draft_of_another_process_was_left(tmp_path: Path) -> None:
    (tmp_path / f".ranks.json.{os.getpid()}").touch(mode=0o666)
    Invitation(host="127.0.0.1", port=1, token="t" * 64).write(tmp_path / "ranks.json")
    assert stat.S_IMODE((tmp_path / "ranks.json").stat().st_mode) == 0o600


def test_a_pickle_is_no_call_and_runs_nothing(tmp_path: Path) -> None:
    for payload in (pickle.dumps(Bomb(tmp_path / "executed")), b"", b"\xc1", encode_call("train")[:-1]):
        with pytest.raises(InvalidCallError):
            decode_call(payload)
    assert not (tmp_path / "executed").exists()


def test_a_pass_reaches_another_rank_with_the_same_bits() -> None:
    micro = Microbatch(
        inputs_BT=np.arange(6, dtype=np.int64).reshape(2, 3)[:, ::-1],
        sequences=PackedSequences.unshared([4, 2]),
        num_shared=1,
        predicted_at_N=np.array([0, 4]),
        targets_N=np.array([5, 6]),
        sampled_logprobs_N=np.array([-0.1, np.nan], dtype=np.float32),
        advantages_N=np.array([1.0, -1.0], dtype=np.float32),
        temperatures_N=np.ones(2, dtype=np.float32),
        weights_N=np.array([1e-8, 0.5], dtype=np.float32),
        row_of_N=np.zeros(2, dtype=np.int64),
        num_rows=2,
        members=(0, 1),
        lags_N=np.array([0, -1], dtype=np.int8),
        sources=(RowSource(GroupId("a@0"), 1, 0), RowSource(GroupId("b@0"), 0, 2)),
    )
    call = decode_call(encode_call("train", (7, [[(micro, True)], [(micro, False)]])))
    step, found = call.arguments
    passes = read_passes(found)
    assert (step, [[own for _, own in part] for part in passes]) == (7, [[True], [False]])
    sent, received = asdict(micro), asdict(passes[0][0][0])
    assert passes[0][0][0].sources == micro.sources
    assert sent["sequences"].pop("sources_F").tolist() == received["sequences"].pop("sources_F").tolist()
    for name, value in sent.items():
        if isinstance(value, np.ndarray):
            assert (value.dtype, value.shape) == (received[name].dtype, received[name].shape)
            assert value.tobytes() == received[name].tobytes(), name
            assert received[name].flags.writeable
        else:
            assert value == received[name], name
