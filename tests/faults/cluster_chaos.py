"""Faults of machines and networks during a run on three machines in network namespaces: `make chaos-cluster SEED=1 EVENTS=100`.

The first machine runs `rollbook train`, with its ledger in PostgreSQL, which has a synchronous standby. A policy server and a
dispatcher join from the other two. A seed decides the faults: machines and single processes killed, processes stopped, links cut
for less or more than a lease, slow links that lose packets, the database restarted, killed, or lost so that its standby is
promoted, a full disk of one machine or of the run, and the head killed and started again. Then the run is drained, resumed,
finished, audited and replayed. A wait for the database that the ledger does not report is a violation. The output of the
processes is written to a separate directory (`--logs`), with the logs of the run if it failed. The last line of the output is
JSON.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rollbook.ledger.lease_expiry import STALL_S
from tests.faults.chaos import SUPERVISED, Chaos, write_line
from tests.faults.chaos_report import CLUSTER_RESULTS, Fault, Kind, Report, record
from tests.parts.ledger.postgres import PostgresServer, own_server
from tests.parts.run.network import Machine, machines
from tests.parts.run.small import REPOSITORY

WEIGHTS = {
    Kind.NODE: 20,
    Kind.LINK: 20,
    Kind.SLOW_LINK: 15,
    Kind.KILL: 15,
    Kind.STOP: 5,
    Kind.DATABASE: 10,
    Kind.DATABASE_KILL: 5,
    Kind.FAIL_OVER: 8,
    Kind.HEAD: 6,
    Kind.DISK: 4,
    Kind.NODE_DISK: 6,
}
CUT_S = (2.0, 30.0)
"""Leases are 15 s long."""
DELAY_S, LOSS = 0.2, 0.05
PROMOTE_S = (0.0, 30.0)
"""From the loss of a primary until its standby is promoted."""
HEAL_S = 600.0
MEMBERS = ("policy", "rollout")
LOGS = REPOSITORY / "build" / "chaos-cluster"


class Joined:
    """`rollbook join` on a machine. It is started again when it has ended, as an operator or a scheduler would."""

    def __init__(self, run_dir: Path, role: str, machine: Machine, output: Path) -> None:
        self._run_dir = run_dir
        self._role = role
        self._output = output
        self.machine = machine
        self._process: subprocess.Popen[bytes] | None = None
        self._began_at = 0

    def keep(self) -> None:
        """Start it unless it runs. Without a running run there is nothing to join."""
        if (self._process is not None and self._process.poll() is None) or not self._addresses.exists():
            return
        command = [sys.executable, "-m", "rollbook", "join", str(self._run_dir), "--role", self._role]
        command += ["--host", self.machine.address]
        self._began_at = self._output.stat().st_size if self._output.exists() else 0
        with self._output.open("ab") as output:
            self._process = subprocess.Popen(
                self.machine.command(*command), stdout=output, stderr=output, cwd=REPOSITORY, start_new_session=True
            )

    def has_joined(self) -> bool:
        self.keep()
        return self._output.exists() and b"has joined" in self._output.read_bytes()[self._began_at :]

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    @property
    def _addresses(self) -> Path:
        return self._run_dir / "addresses.json"


class ClusterChaos(Chaos):
    def __init__(
        self,
        directory: Path,
        nodes: Sequence[Machine],
        databases: Sequence[PostgresServer],
        *,
        seed: int,
        events: int,
        seconds: float,
        kinds: Sequence[Kind],
        logs: Path,
        log: Callable[[str], None],
    ) -> None:
        super().__init__(
            directory, seed=seed, kills=events, env="guessing", kinds=kinds, seconds=seconds, heal_s=HEAL_S, log=log
        )
        self._events = events
        self.unreported: list[str] = []
        self._nodes = list(nodes)
        self._primary, self._standby = databases
        head, *others = nodes
        self.run.machine = head
        self.run.outputs = logs
        # Reached through sockets in the file system, from all machines.
        hosts, ports = (
            ",".join(map(str, part)) for part in zip(*((d.directory, d.port) for d in databases), strict=True)
        )
        self.run.overrides += [
            f"ledger.store={json.dumps(f'postgresql://tester@/postgres?host={hosts}&port={ports}')}",
            f"cluster.host={json.dumps(head.address)}",
            "cluster.allow_join=true",
        ]
        self._members = [
            Joined(self.run.directory, role, node, logs / f"{role}.out")
            for role, node in zip(MEMBERS, others, strict=True)
        ]

    def run_all(self) -> Report:
        try:
            report = super().run_all()
        finally:
            for member in self._members:
                member.stop()
        report.violations += self.unreported
        return report

    def _is_due(self) -> bool:
        return len(self.report.faults) < self._events

    def _one_fault(self) -> None:
        self.run.until(self._have_all_joined, what="all members have joined", within_s=self._heal_s)
        kind = self._rng.choices(self._kinds, [WEIGHTS[kind] for kind in self._kinds])[0]
        node = self._rng.choice(self._nodes)
        match kind:
            case Kind.KILL | Kind.STOP:
                self._hit([self._rng.choice(SUPERVISED)], kind)
            case Kind.NODE:
                self._lose_node(self._rng.choice(self._members))
            case Kind.LINK:
                with self._during(Fault(kind, self._name(node))):
                    node.set_link("down")
                    time.sleep(self._rng.uniform(*CUT_S))
                    node.set_link("up")
            case Kind.SLOW_LINK:
                with self._during(Fault(kind, self._name(node))), node.slow_link(delay_s=DELAY_S, loss=LOSS):
                    self.run.until(self._next_step(), what="a step over a slow link", within_s=self._heal_s)
            case Kind.NODE_DISK:
                node = self._rng.choice(self._members).machine
                with self._during(Fault(kind, self._name(node))), node.full_disk():
                    for _ in range(2):  # the second one needs a publication that this machine cannot store
                        self.run.until(self._next_step(), what="a step with a full disk", within_s=self._heal_s)
            case Kind.DATABASE | Kind.DATABASE_KILL:
                with self._during(Fault(kind, "database")):
                    (self._primary.stop if kind is Kind.DATABASE else self._primary.kill)()
                    time.sleep(self._rng.uniform(0.0, 5.0))
                    start_database(self._primary)
            case Kind.FAIL_OVER:
                is_reported = self._logged("ledger", "ledger.store_stalled")
                lost_s = self._rng.uniform(*PROMOTE_S)
                with self._during(Fault(kind, "database")):
                    self._primary.kill()
                    time.sleep(lost_s)
                    self._standby.promote()
                    self._primary, self._standby = self._standby, self._primary
                self._standby.follow(self._primary, **socket_settings(self._standby))
                if lost_s > 2 * STALL_S and not is_reported():
                    self.unreported.append(f"the ledger did not report that the database was lost for {lost_s:.0f} s")
            case Kind.HEAD:
                with self._during(Fault(kind, "head", kills=len(self._nodes[0].pids()))):
                    self._nodes[0].kill_all()
                    self.run.process.wait()
                    self.run.start()
            case Kind.DISK:
                self._fill_disk()

    def _have_all_joined(self) -> bool:
        joined = [member.has_joined() for member in self._members]  # each is started again if it has ended
        return all(joined)

    def _lose_node(self, member: Joined) -> None:
        fault, began = Fault(Kind.NODE, self._name(member.machine)), time.monotonic()
        fault.kills = len(member.machine.pids())
        self.report.faults.append(fault)
        member.machine.kill_all()
        trains = self._next_step()
        self._await(fault, lambda: member.has_joined() and trains(), began)

    @contextmanager
    def _during(self, fault: Fault) -> Iterator[None]:
        """The fault is over at the end of the block; it has healed with the next step after that."""
        self.report.faults.append(fault)
        yield
        self._await(fault, self._next_step(), time.monotonic())

    def _await(self, fault: Fault, healed: Callable[[], bool], began: float) -> None:
        def is_healed() -> bool:
            for member in self._members:
                member.keep()
            return healed()

        super()._await(fault, is_healed, began)

    def _name(self, node: Machine) -> str:
        return ("head", "machine of the policy server", "machine of the dispatcher")[self._nodes.index(node)]


def start_database(server: PostgresServer) -> None:
    server.start(**socket_settings(server))


def socket_settings(server: PostgresServer) -> dict[str, str]:
    return {"unix_socket_directories": str(server.directory)}


def primary_and_standby() -> tuple[PostgresServer, PostgresServer]:
    primary, standby = own_server(), own_server()
    for server in (primary, standby):
        server.stop()
        server.directory.chmod(0o755)
    start_database(primary)
    standby.follow(primary, **socket_settings(standby))
    return primary, standby


def run_chaos(*, seed: int, events: int, seconds: float, kinds: Sequence[Kind], logs: Path) -> Report:
    logs.mkdir(parents=True, exist_ok=True)
    for member in MEMBERS:
        (logs / f"{member}.out").unlink(missing_ok=True)
    databases = primary_and_standby()
    with machines(3) as nodes, tempfile.TemporaryDirectory(prefix="rollbook-chaos-") as name:
        chaos = ClusterChaos(
            Path(name),
            nodes,
            databases,
            seed=seed,
            events=events,
            seconds=seconds,
            kinds=kinds,
            logs=logs,
            log=write_line,
        )
        try:
            chaos.run_all()
        except Exception as error:
            write_line(f"failed: {''.join(traceback.format_exception(error))}")
            chaos.report.violations.append(f"the run failed: {str(error).partition(chr(10))[0]}")
        if not chaos.report.ok:
            keep_logs(chaos.run.directory, databases, logs)
    for server in databases:
        server.kill()
    return chaos.report


def keep_logs(run_directory: Path, databases: Sequence[PostgresServer], to: Path) -> None:
    shutil.copytree(run_directory / "logs", to / "run", dirs_exist_ok=True)
    for server in databases:
        shutil.copy(server.directory / "log", to / f"database-{server.port}.log")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="chaos-cluster", description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--events", type=int, default=100)
    parser.add_argument("--minutes", type=float, default=120.0, help="no new faults after this time")
    parser.add_argument("--kinds", nargs="+", type=Kind, default=list(WEIGHTS), help="only these kinds of faults")
    parser.add_argument("--logs", type=Path, default=LOGS, help="directory for the output of the processes")
    parser.add_argument("--write", action="store_true", help=f"record the result in {CLUSTER_RESULTS.name}")
    args = parser.parse_args(argv)
    report = run_chaos(
        seed=args.seed, events=args.events, seconds=60 * args.minutes, kinds=args.kinds, logs=args.logs.resolve()
    )
    write_line(report.table())
    row = report.row()
    write_line(json.dumps(row))
    if args.write:
        record(CLUSTER_RESULTS, row)
    return 0 if report.ok else 1


if __name__ == "__main__":
    sys.exit(main())
