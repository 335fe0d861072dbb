"""Machines in network namespaces: each has its own address, loopback, shared memory and directory for temporary files of Ray.

They share the file system, like machines with a network file system. Needs util-linux and iproute2, and root or user namespaces.
"""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

RAY_DIRECTORY = Path("/tmp/ray")
SHARED = "/dev/shm"
SLOW_LINK = Path(__file__).with_name("slow_link.py")
LISTENING, LOOPBACK = "0A", "0100007F"
"""As in /proc/net/tcp."""
USER_FLAGS = [] if os.getuid() == 0 else ["--user", "--preserve-credentials"]

# Makes a bridge and the machines and prints their pids. Kills every process on them when its standard input is closed.
SCRIPT = """
set -e
end() {
  for process in /proc/[0-9]*; do
    net=$(readlink "$process/ns/net") && case "$nets" in *"$net"*) kill -9 "${process#/proc/}" ;; esac
  done 2>/dev/null
}
trap end EXIT
ip link add br0 type bridge
ip link set br0 up
for number in $(seq "$1"); do
  unshare --net --mount sh -c '
    mount -t tmpfs tmpfs /dev/shm
    mkdir -p "$1" && mount -t tmpfs tmpfs "$1"
    ip link set lo up
    exec sleep infinity' machine "$2" </dev/null >/dev/null &
  pids="$pids $!"
  while [ "$(cat /proc/$!/comm)" != sleep ]; do sleep 0.02; done
  nets="$nets $(readlink /proc/$!/ns/net)"
  ip link add "v$number" type veth peer name eth0 netns $!
  ip link set "v$number" master br0 up
  nsenter --target $! --net ip address add "10.77.0.$number/24" dev eth0
  nsenter --target $! --net ip link set eth0 up
done
echo $pids
read -r _ || true
"""


@dataclass(frozen=True, slots=True)
class Machine:
    address: str
    pid: int
    """Of a process that keeps the namespaces."""

    def command(self, *arguments: str) -> list[str]:
        """Runs a program on this machine."""
        return ["nsenter", "--target", str(self.pid), *USER_FLAGS, "--net", "--mount", f"--wd={Path.cwd()}", *arguments]

    def pids(self) -> list[int]:
        """All processes on this machine, apart from the one that keeps it."""
        own = Path(f"/proc/{self.pid}/ns/net").readlink()
        found = []
        for entry in Path("/proc").iterdir():
            with suppress(OSError, ValueError):
                if (entry / "ns" / "net").readlink() == own and int(entry.name) != self.pid:
                    found.append(int(entry.name))
        return found

    @contextmanager
    def slow_link(self, *, delay_s: float, loss: float) -> Iterator[None]:
        """What leaves this machine arrives late, and some packets are lost. Needs root, and no netem in the kernel."""
        command = self.command(sys.executable, str(SLOW_LINK), self.address, str(delay_s), str(loss))
        relay = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert relay.stdout is not None
        assert relay.stdout.readline(), "the link cannot be slowed"
        try:
            yield
        finally:
            relay.communicate()

    @contextmanager
    def full_disk(self) -> Iterator[None]:
        """No space is left on the disk of this machine: its shared memory, where a policy server keeps copies of the weights."""
        # A size of 0 would mean no limit.
        self._run(f"mount -o remount,size=$(( $(df --output=used -k {SHARED} | tail -1) + 4 ))k {SHARED}")
        try:
            yield
        finally:
            self._run(f"mount -o remount,size=50% {SHARED}")

    def set_link(self, state: Literal["up", "down"]) -> None:
        self._run(f"ip link set eth0 {state}")

    def _run(self, script: str) -> None:
        subprocess.run(self.command("sh", "-ec", script), check=True, capture_output=True)

    def kill_all(self) -> None:
        """As a power failure: every process at once."""
        while pids := self.pids():
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def listening_ports(self) -> list[int]:
        """TCP ports of this machine that other machines can reach."""
        rows = (Path(f"/proc/{self.pid}/net/tcp").read_text(encoding="ascii")).splitlines()[1:]
        addresses = [row.split()[1] for row in rows if row.split()[3] == LISTENING]
        return sorted({int(port, 16) for host, port in (a.split(":") for a in addresses) if host != LOOPBACK})

    def sent_bytes(self) -> int:
        """Bytes that left this machine since it was made."""
        return self._counter(8)

    def received_bytes(self) -> int:
        """Bytes that arrived at this machine since it was made."""
        return self._counter(0)

    def _counter(self, column: int) -> int:
        text = subprocess.run(
            self.command("cat", "/proc/self/net/dev"), capture_output=True, text=True, check=True
        ).stdout
        row = next(line for line in text.splitlines() if line.strip().startswith("eth0:"))
        return int(row.split(":")[1].split()[column])


@contextmanager
def machines(number: int) -> Iterator[Sequence[Machine]]:
    """Skips the test where namespaces are forbidden."""
    if missing := [name for name in ("unshare", "nsenter", "ip") if shutil.which(name) is None]:
        pytest.skip(f"network namespaces need {', '.join(missing)}")
    flags = [] if os.getuid() == 0 else ["--map-root-user"]
    holder = subprocess.Popen(
        ["unshare", *flags, "--net", "--mount", "sh", "-c", SCRIPT, "network", str(number), str(RAY_DIRECTORY)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout is not None
    made = [
        Machine(f"10.77.0.{index}", int(pid)) for index, pid in enumerate(holder.stdout.readline().split(), start=1)
    ]
    if not made:
        pytest.skip(f"network namespaces cannot be used here: {holder.communicate()[1][-300:]}")
    try:
        yield made
    finally:
        for machine in made:
            machine.kill_all()
        holder.communicate()
