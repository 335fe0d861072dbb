"""Kill random processes of a run and check that nothing is lost: `make chaos SEED=1 KILLS=100`.

The run has every kind of process: ledger, policy server, environment server with simulators and command lines, trainer, dispatcher,
worker, reward process, process template; with `--env sandbox` also coding agents, verifiers and their sandboxes. A seed decides
the faults (`Kind`), their moments and victims: kills, single, several at once, or again while the replacement starts; SIGTERM;
processes stopped for longer than every lease; kills while the run starts or drains, or right after an action of an operator; a full
disk; a clock that jumps. Then the run is drained, resumed, finished, audited and replayed. In the environment `sandbox` every
episode does the right thing, so a lower reward was caused by a fault. With `--jobs` several runs share the kills. The last line of
the output is JSON.
"""

import argparse
import asyncio
import errno
import itertools
import json
import math
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import psutil

from rollbook.contracts.admission import ActionKind, GateState, LedgerStatus
from rollbook.contracts.freshness import BatchPolicy
from rollbook.ledger.rules import runs
from rollbook.ledger.stores.registry import open_reader, sqlite_url
from rollbook.run.actions import act
from rollbook.run.reader import open_run
from rollbook.sandbox.bubblewrap import guest_program
from rollbook.sandbox.sandbox import Image
from tests.faults.chaos_report import RESULTS, Fault, Kind, Report, merge, record
from tests.parts.concurrency.processes import require_end
from tests.parts.run.machine import Machine
from tests.parts.run.small import CONFIG, END_S, REPOSITORY, SmallRun, rollbook
from tests.parts.sandbox.agent_run import REWARD, VERIFIER, agent_program, write_agent_run

AWS = REPOSITORY / "examples" / "02_aws_cli_agent"
REWARDS = """
[rollout.rewards]
environment_weight = 1.0

[rollout.rewards.functions.brief]
path = "chaos_rewards:brief"
weight = 0.01
"""
REWARD_MODULE = "def brief(case):\n    return -float(case.num_sampled)\n"
SETTINGS = [
    "run.most_quick_deaths=1000",
    "run.silence_s=12.0",
    "run.ready_s=300.0",
    "trainer.max_steps=1000000",
    "trainer.checkpoint_every=5",
    "gate.max_attempts=1000",
    "rollout.retry_budget=32",
    "rollout.max_seconds=60.0",
    "rollout.worker_silence_s=15.0",
    "rollout.rewards.processes=2",
    "gate.group_deadline_s=120.0",
]
ENVIRONMENTS: dict[str, list[str]] = {
    "guessing": [*SETTINGS, "env.pool_size=32", "env.args.step_s=0.05", "inference.max_queued=64"],
    "aws": [*SETTINGS, "env.pool_size=4", "rollout.completions_per_prompt=2", "rollout.max_turns=6"],
    "sandbox": [*SETTINGS, "sandbox.at_once=6"],
}
SUPERVISED = ("trainer", "policy", "ledger", "env", "rollout")
ROLES = (*SUPERVISED, "worker", "reward", "template")
SHORT = ("sandbox", "verifier", "agent")
"""Processes of single episodes: nothing replaces them, and the run has healed when it trains."""
# Processes that a role starts itself, by their module.
MODULES = {
    "simulator": "rollbook.envs.builtin.awscli.cloud.simulator_process",
    "command line": "rollbook.envs.builtin.awscli.cloud.worker_process",
    "reward": "rollbook.rollout.rewards.main",
    "template": "rollbook.concurrency.child_process.template_main",
}
POOL_SIZES = {"simulator": 4, "command line": 4, "reward": 2}
"""How many of these a run keeps. More exist for a moment, while those of a killed parent end."""
SHARED_REWARD = 1
"""The same of reward processes for coroutines, as in `sandbox`. One more repeats calls, but only after a failure."""
WEIGHTS = {
    Kind.KILL: 50,
    Kind.SEVERAL: 20,
    Kind.TWICE: 12,
    Kind.TERMINATE: 8,
    Kind.STOP: 6,
    Kind.START: 3,
    Kind.DRAIN: 3,
    Kind.ACTION: 4,
    Kind.DISK: 3,
    Kind.CLOCK: 3,
}
OBEYS = {
    ActionKind.PAUSE: "rollout",
    ActionKind.CHECKPOINT: "trainer",
    ActionKind.QUARANTINE: "ledger",
    ActionKind.DRAIN: "supervisor",
}
"""The process that is killed right after the action."""
SIGNALS = {Kind.TERMINATE: signal.SIGTERM, Kind.STOP: signal.SIGSTOP}
QUICK = (Kind.KILL, Kind.SEVERAL, Kind.TWICE, Kind.TERMINATE, Kind.CLOCK)
"""Faults without a restart of the whole run and without long waits."""
JUMPS_S = (86_400, -86_400, 3_600, -3_600, 0)
STOP_S = 45.0
"""Longer than the leases of groups' owners (30 s) and every silence limit above."""
HEAL_S = 300.0
"""Limit of the time to heal, on a busy machine."""
LOOK_S = 0.1
"""Between two looks at the table of processes, which costs milliseconds."""
AFTER_STEPS = 3


class Chaos:
    def __init__(
        self,
        directory: Path,
        *,
        seed: int,
        kills: int,
        env: str,
        kinds: Sequence[Kind] = tuple(WEIGHTS),
        policy: BatchPolicy | None = None,
        seconds: float = math.inf,
        heal_s: float = HEAL_S,
        log: Callable[[str], None] = lambda text: None,
    ) -> None:
        """The faults end after `kills` processes were killed, or after `seconds`."""
        self._seconds = seconds
        self._heal_s = heal_s
        self._rng = random.Random(seed)
        self._kills = kills
        self._supervised = tuple(role for role in SUPERVISED if (env, role) != ("sandbox", "env"))
        self._roles = tuple(role for role in ROLES if role in self._supervised or role not in SUPERVISED)
        if env == "aws":
            self._roles += ("simulator", "command line")
        self._short = SHORT if env == "sandbox" else ()
        self._arguments = {
            **MODULES,
            # bubblewrap and the guest both have the program of the guest as an argument.
            "sandbox": guest_program(Image())[-1],
            "verifier": VERIFIER,
            "agent": str(agent_program(directory)),
        }
        self._looked_at = -math.inf
        self._seen: list[psutil.Process] = []
        self._env = env
        self._kinds = list(kinds)
        self._actions = itertools.cycle(OBEYS)
        self._log = log
        self.report = Report(seed=seed, env=env)
        config = CONFIG
        if env == "aws":
            config = (AWS / "run.toml").read_text(encoding="utf-8")
        elif env == "sandbox":
            config = write_agent_run(directory)
        chosen = [] if policy is None else [f"gate.batch_policy={policy}"]
        self.run = SmallRun(directory, [*ENVIRONMENTS[env], *chosen], config=config + REWARDS)
        if env != "sandbox":
            (directory / "chaos_rewards.py").write_text(REWARD_MODULE, encoding="utf-8")
        if env == "aws":
            shutil.copy(AWS / "aws_reference.py", directory)
        if {Kind.DISK, Kind.CLOCK} & set(kinds):
            self._machine = Machine(directory, watched=self.run.directory)
            self.run.environment = self._machine.environment

    def run_all(self) -> Report:
        began = time.monotonic()
        self.run.start()
        try:
            self.run.until(lambda: self.run.step() >= 2, what="step 2", within_s=self._heal_s)
            while self._is_due() and time.monotonic() < began + self._seconds:
                self._one_fault()
            self.run.until(self._next_step(), what="a step after the last fault", within_s=self._heal_s)
            self._finish()
        finally:
            self.run.stop()
        self.report.seconds = time.monotonic() - began
        self._check()
        return self.report

    def _is_due(self) -> bool:
        return self.report.kills < self._kills

    # ------------------------------------------------------------------ faults

    def _one_fault(self) -> None:
        kind = self._rng.choices(self._kinds, [WEIGHTS[kind] for kind in self._kinds])[0]
        match kind:
            case Kind.KILL:
                self._hit([self._rng.choice((*self._roles, *3 * self._short))], kind)
            case Kind.TERMINATE | Kind.STOP:
                # Not of an agent: one that is stopped for long is a slow one, whose time is over.
                self._hit([self._rng.choice(self._roles)], kind)
            case Kind.TWICE:
                self._hit([self._rng.choice(self._supervised)], kind)
            case Kind.SEVERAL:
                left = max(1, self._kills - self.report.kills)
                roles = (*self._roles, *self._short)
                self._hit(self._rng.sample(roles, min(left, self._rng.choice((2, 3)))), kind)
            case Kind.START:
                self._kill_supervisor()
            case Kind.DRAIN:
                self._kill_while_draining()
            case Kind.ACTION:
                self._kill_after_action(next(self._actions))
            case Kind.DISK:
                self._fill_disk()
            case Kind.CLOCK:
                self._machine.set_clock(self._rng.choice(JUMPS_S))
                self._heals(Fault(kind, "run"), self._next_step())
        # Some faults follow at once; most hit a run that trains.
        if self._rng.random() < 2 / 3:
            self.run.until(self._next_step(), what="a step after a fault", within_s=self._heal_s)

    def _hit(self, roles: Sequence[str], kind: Kind) -> None:
        """Kill or stop processes, and wait until all have healed."""
        waiting: list[tuple[Fault, Callable[[], bool], float]] = []
        for role in roles:
            pid = self.run.until(partial(self._pid, role), what=f"{role} was up", within_s=self._heal_s)
            healed = self._replaced(role, pid)
            if not self._send(pid, SIGNALS.get(kind, signal.SIGKILL)):
                continue  # it ended with an earlier victim
            fault, began = Fault(kind, role, kills=1), time.monotonic()
            self.report.faults.append(fault)
            if kind is Kind.STOP:
                healed = self._continued(pid, healed)
            waiting.append((fault, healed, began))
            if kind is Kind.TWICE:
                again = self.run.until(
                    partial(self._starting, role, pid), what=f"{role} starts again", within_s=self._heal_s
                )
                fault.kills += self._send(again, signal.SIGKILL)
        while waiting:
            self.run.until(
                lambda: any(healed() for _, healed, _ in waiting), what=f"{waiting} healed", within_s=self._heal_s
            )
            for one in [one for one in waiting if one[1]()]:
                self._note(one[0], one[2])
                waiting.remove(one)

    def _continued(self, pid: int, replaced: Callable[[], bool]) -> Callable[[], bool]:
        """Whether a stopped process was replaced, or the run trains with it: it continues after `STOP_S`, as after the sleep of a
        laptop."""
        until = time.monotonic() + STOP_S
        while time.monotonic() < until and psutil.pid_exists(pid) and not replaced():
            time.sleep(0.05)
        self._send(pid, signal.SIGCONT)
        trains = self._next_step()
        return lambda: replaced() or trains()

    def _kill_supervisor(self) -> None:
        """Kill the supervisor, start the same command, and kill one of its processes while it starts."""
        fault, began = Fault(Kind.START, "supervisor", kills=1), time.monotonic()
        self.report.faults.append(fault)
        self.run.stop()
        self.run.start()
        role = self._rng.choice(self._supervised)
        pid = self.run.until(lambda: self._starting(role, -1), what=f"{role} starts", within_s=self._heal_s)
        fault.kills += self._send(pid, signal.SIGKILL)
        self._await(fault, self._next_step(), began)

    def _kill_while_draining(self) -> None:
        role = self._rng.choice(self._supervised)
        pid = self.run.until(partial(self._pid, role), what=f"{role} was up", within_s=self._heal_s)
        fault, began = Fault(Kind.DRAIN, role), time.monotonic()
        self.report.faults.append(fault)
        self.run.process.send_signal(signal.SIGINT)
        time.sleep(self._rng.uniform(0, 0.3))
        fault.kills = self._send(pid, signal.SIGKILL)
        ended = self.run.wait(self._heal_s)
        assert ended["exit_code"] in (0, 130), ended["stderr"][-3000:]
        self.run.start()
        self._await(fault, self._next_step(), began)

    def _kill_after_action(self, kind: ActionKind) -> None:
        """An operator acts, and the process that obeys is killed at once. The action holds in its successor."""
        role = OBEYS[kind]
        pid = self.run.until(partial(self._pid, role), what=f"{role} was up", within_s=self._heal_s)
        fault, began = Fault(Kind.ACTION, role), time.monotonic()
        self.report.faults.append(fault)
        task = ""
        if kind is ActionKind.QUARANTINE:
            task = self.run.until(self._open_task, what="a group is played", within_s=self._heal_s)
        self._act(kind, task)
        if kind is ActionKind.DRAIN:
            self._resume_drain(fault)
        else:
            replaced = self._replaced(role, pid)
            fault.kills = self._send(pid, signal.SIGKILL)
            self.run.until(replaced, what=f"{role} was replaced", within_s=self._heal_s)
        if kind is ActionKind.PAUSE:
            assert self._status().gate is GateState.PAUSED, self._status()
            self._act(ActionKind.RESUME)
        elif kind is ActionKind.CHECKPOINT:
            written = lambda: self._status().checkpoint_requested is None  # noqa: E731
            self.run.until(written, what="the checkpoint", within_s=self._heal_s)
        elif kind is ActionKind.QUARANTINE:
            assert self._status().quarantined == (task,), self._status()
            self._act(ActionKind.READMIT, task)
        self._await(fault, self._next_step(), began)

    def _resume_drain(self, fault: Fault) -> None:
        """Kill the supervisor; the next one completes the drain, and the one after it continues the run."""
        self.run.stop()
        fault.kills = 1
        drained = self.run.start().wait(self._heal_s)
        assert (drained["exit_code"], drained["end"]) == (0, "drained"), drained["stderr"][-3000:]
        self.run.start()

    def _act(self, kind: ActionKind, target: str = "") -> None:
        asyncio.run(act(str(self.run.directory), kind, author="chaos", target=target))

    def _status(self) -> LedgerStatus:
        with open_reader(sqlite_url(self.run.directory / "ledger")) as reader:
            return reader.read_now(lambda tx: runs.status(tx, tx.runs.ids()[0]))

    def _open_task(self) -> str:
        """The task of a group that is being played."""
        with open_reader(sqlite_url(self.run.directory / "ledger")) as reader:
            found = reader.read_now(lambda tx: tx.groups.dispatched(tx.runs.ids()[0]))
        return str(found[0].task_id) if found else ""

    def _fill_disk(self) -> None:
        fault, began = Fault(Kind.DISK, "run"), time.monotonic()
        self.report.faults.append(fault)
        self._machine.set_write_error(errno.ENOSPC)
        ended = self.run.wait(self._heal_s)
        self._machine.set_write_error(0)
        assert ended["exit_code"] == 1, ended["stderr"][-3000:]
        assert "Traceback" not in ended["stderr"], ended["stderr"][-3000:]
        self.run.start()
        self._await(fault, self._next_step(), began)

    # ------------------------------------------------------------------ healing

    def _heals(self, fault: Fault, healed: Callable[[], bool]) -> None:
        self.report.faults.append(fault)
        self._await(fault, healed, time.monotonic())

    def _await(self, fault: Fault, healed: Callable[[], bool], began: float) -> None:
        self.run.until(healed, what=f"{fault} healed", within_s=self._heal_s)
        self._note(fault, began)

    def _note(self, fault: Fault, began: float) -> None:
        fault.heal_s = time.monotonic() - began
        done = f"{self.report.kills}/{self._kills}"
        self._log(f"{done:>9} {fault.kind}: {fault.role} healed after {fault.heal_s:.2f} s, at step {self.run.step()}")

    def _next_step(self) -> Callable[[], bool]:
        """Whether the trainer has trained a step since now. Sizes of files, not times: the clock may jump."""
        file = self.run.directory / "metrics.jsonl"
        size = file.stat().st_size if file.exists() else 0
        return lambda: any(row.get("process") == "trainer" for row in _rows_after(file, size))

    def _replaced(self, role: str, pid: int) -> Callable[[], bool]:
        """Whether a new process has replaced this one and is ready."""
        if role == "template":
            if psutil.Process(pid).ppid() == self.run.process.pid:
                return self._logged("supervisor", "run.template.ready")
            # A dispatcher's own template: without it, workers are started plainly.
            return self._next_step()
        if role in SHORT:
            return self._next_step()
        if role in MODULES:
            kept = SHARED_REWARD if role == "reward" and self._env == "sandbox" else POOL_SIZES[role]
            needed = min(len(self._running(MODULES[role])), kept)

            def is_back() -> bool:
                alive = self._running(MODULES[role])
                return pid not in alive and len(alive) >= needed

            return is_back
        if role == "worker":
            return self._logged("rollout", "rollout.worker_ready")
        return lambda: self.run.pid(role) not in (None, pid)

    def _logged(self, process: str, event: str) -> Callable[[], bool]:
        """Whether a process has logged this event since now."""
        file = self.run.directory / "logs" / f"{process}.jsonl"
        size = file.stat().st_size
        return lambda: any(row["event"] == event for row in _rows_after(file, size))

    def _pid(self, role: str) -> int | None:
        if role in self._arguments:
            found = self._running(self._arguments[role])
            return self._rng.choice(found) if found else None
        return self.run.pid(role)

    def _starting(self, role: str, before: int) -> int | None:
        """The new process of a role, ready or not."""
        try:
            rows = json.loads((self.run.directory / "processes.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        pid = rows["processes"].get(role, {}).get("pid")
        return pid if pid != before and pid is not None and psutil.pid_exists(pid) else None

    def _running(self, argument: str) -> list[int]:
        """Processes with this argument in their command line."""
        if time.monotonic() > self._looked_at + LOOK_S:
            self._seen = self.run.descendants()
            self._looked_at = time.monotonic()
        found = []
        for process in self._seen:
            try:
                if argument in process.cmdline():
                    found.append(process.pid)
            except psutil.Error:
                continue
        return sorted(found)

    def _send(self, pid: int, number: signal.Signals) -> int:
        """1 if the process existed."""
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            return 0
        return 1

    # ------------------------------------------------------------------ the end

    def _finish(self) -> None:
        """Drain, then resume and run to a regular end."""
        processes = self.run.descendants()
        self.run.process.send_signal(signal.SIGINT)
        drained = self.run.wait(self._heal_s)
        assert (drained["exit_code"], drained["end"]) == (0, "drained"), drained["stderr"][-3000:]
        require_end(processes, within_s=END_S)
        self.run.overrides.append(f"trainer.max_steps={drained['steps'] + AFTER_STEPS}")
        ended = self.run.start().wait(self._heal_s)
        assert (ended["exit_code"], ended["end"]) == (0, "finished"), ended["stderr"][-3000:]
        self.report.steps = ended["steps"]

    def _check(self) -> None:
        report = self.report
        audit = json.loads(rollbook("audit", str(self.run.directory), "--json").stdout)
        report.violations = list(audit["violations"])
        report.dropped = dict(audit["dropped"])
        with open_run(self.run.directory) as record:
            acknowledged = {step.step for step in record.steps() if step.receipt == "acknowledged"}
            groups = [group for batch in record.batches(report.steps) for group in batch.groups]
        trained = [group.id for group in groups]
        if self._short:
            rewards = [sample.reward for group in groups for sample in group.samples if sample.reward is not None]
            report.scored, report.wrong_rewards = len(rewards), sum(abs(one - REWARD) > 1e-6 for one in rewards)
        report.trained = len(set(trained))
        report.duplicates = len(trained) - report.trained
        # A loss is a step that was not trained, or an opened group without an outcome.
        law = audit["law"]
        unexplained = audit["opened"] - sum(law.values())
        report.losses = abs(unexplained) + len(set(range(1, report.steps + 1)) - acknowledged)
        replayed = rollbook("replay", str(self.run.directory), "--verify")
        report.replays = int(replayed.returncode == 0)


def _rows_after(path: Path, size: int) -> list[dict[str, Any]]:
    """The complete JSON lines that were appended after the file had this size."""
    if not path.exists():
        return []
    with path.open("rb") as file:
        file.seek(size)
        lines = file.read().decode(errors="replace").splitlines()
    return [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]


def write_line(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What the runs of one command have in common. They take environments and batch policies in turn."""

    envs: Sequence[str]
    kinds: Sequence[Kind]
    policies: Sequence[BatchPolicy | None]
    seconds: float
    heal_s: float
    keep: Path | None
    """Directories of failed runs are copied here."""


def run_one(plan: Plan, index: int, seed: int, kills: int) -> Report:
    log = partial(_write_line_of, seed)
    with tempfile.TemporaryDirectory(prefix="rollbook-chaos-") as name:
        directory = Path(name)
        chaos = Chaos(
            directory,
            seed=seed,
            kills=kills,
            env=plan.envs[index % len(plan.envs)],
            kinds=plan.kinds,
            policy=plan.policies[index % len(plan.policies)],
            seconds=plan.seconds,
            heal_s=plan.heal_s,
            log=log,
        )
        try:
            chaos.run_all()
        except Exception as error:
            # Other runs go on, and the report names this one.
            log(f"failed: {''.join(traceback.format_exception(error))}")
            chaos.report.violations.append(f"the run failed: {str(error).partition(chr(10))[0]}")
        if plan.keep is not None and not chaos.report.ok:
            weights = shutil.ignore_patterns("checkpoints", "weights", "model", "*.so")
            shutil.copytree(directory, plan.keep / f"seed-{seed}", ignore=weights)
        log(json.dumps(chaos.report.row()))
        return chaos.report


def run_several(plan: Plan, seed: int, kills: int, *, jobs: int) -> Report:
    """Runs with the seeds `seed`, `seed + 1`, … at the same time, each with its part of the kills."""
    shares = [kills // jobs + (index < kills % jobs) for index in range(jobs)]
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        found = [pool.submit(run_one, plan, index, seed + index, share) for index, share in enumerate(shares)]
        return merge([one.result() for one in found])


def _write_line_of(seed: int, text: str) -> None:
    write_line(f"seed {seed}: {text}")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="chaos", description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--env", nargs="+", choices=sorted(ENVIRONMENTS), default=["aws"], help="several: by turns")
    parser.add_argument(
        "--kinds", nargs="+", type=Kind, choices=list(WEIGHTS), default=list(WEIGHTS), help="only these kinds of faults"
    )
    parser.add_argument(
        "--policy",
        nargs="+",
        type=BatchPolicy,
        choices=list(BatchPolicy),
        default=[None],
        help="batch policy, several: by turns; default: that of the run",
    )
    parser.add_argument(
        "--jobs", type=int, default=1, help="runs at the same time, which share the kills (two cores each)"
    )
    parser.add_argument(
        "--minutes", type=float, default=math.inf, help="send faults no longer than this; then end the runs"
    )
    parser.add_argument("--heal-s", type=float, default=HEAL_S, help="a run that has not healed after this has failed")
    parser.add_argument("--keep", type=Path, help="copy the directories of failed runs to this directory")
    parser.add_argument(
        "--write", action="store_true", help="record the result for docs/results/chaos.md (then: make docs)"
    )
    args = parser.parse_args(argv)
    plan = Plan(
        envs=args.env,
        kinds=args.kinds,
        policies=args.policy,
        seconds=args.minutes * 60,
        heal_s=args.heal_s,
        keep=args.keep,
    )
    report = run_several(plan, args.seed, args.kills, jobs=args.jobs)
    write_line(report.table())
    row = report.row()
    if args.write:
        record(RESULTS, row)
    write_line(json.dumps(row))
    return 0 if report.ok else 1


if __name__ == "__main__":
    sys.exit(main())
