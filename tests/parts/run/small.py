"""A small run with real processes, a tiny model and an environment that responds after a moment. For tests that kill processes."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

from rollbook.telemetry.json_tail import JsonTail
from tests.parts.concurrency.processes import descendants_running, require_end
from tests.parts.run.network import Machine

REPOSITORY = Path(__file__).parents[3]
EXAMPLE = REPOSITORY / "rollbook" / "demo"
STEPS = 30
LONG_S = 500.0
"""Limit for a whole run on a busy machine, below the limit of a test."""
END_S = 60.0
"""Limit for the processes of a killed supervisor, which force their exit after 5 s. A busy machine needs longer."""

CONFIG = f"""
[run]
name = "small"
seed = 3

[model.build]
hidden_size = 32
layers = 1
heads = 2
kv_heads = 2
intermediate_size = 64
max_position_embeddings = 64
vocabulary = ["0", "1", "2", "3", "4", "5", "6", "7", "higher", "lower", "correct", "invalid"]

[tasks]
source = "number_guessing:tasks"
args = {{ low = 0, high = 7 }}

[env]
name = "delayed_number_guessing"
args = {{ max_turns = 4, step_s = 0.02 }}

[rollout]
function = "number_guessing"
completions_per_prompt = 4
max_turns = 4
max_seconds = 20.0
drop_constant_reward = false

[rollout.sampling]
max_tokens = 1

[gate]
groups_per_step = 4
max_groups_in_flight = 8
max_head_offpolicy_versions = 2
group_deadline_s = 30.0

[trainer]
max_steps = {STEPS}
lr = 1e-3
ppo_n_minibatches = 2
checkpoint_every = 7
"""


class SmallRun:
    """`rollbook train` as a child process, observed from outside as a user would."""

    def __init__(self, directory: Path, overrides: Sequence[str] = (), *, config: str = CONFIG) -> None:
        self.directory = directory / "run"
        self.overrides = list(overrides)
        self.has_dashboard = False
        self.environment: dict[str, str] = {}
        """Additional environment variables of the run's processes."""
        self.module = "rollbook"
        """Its main function is the command line."""
        self.options: list[str] = []
        """Further options of `rollbook train`."""
        self.machine: Machine | None = None
        """Where `rollbook train` is started; None: on this machine."""
        self.outputs = directory
        """Where stdout and stderr of `rollbook train` are written."""
        self._config = directory / "run.toml"
        self._config.write_text(config, encoding="utf-8")
        for module in EXAMPLE.glob("*.py"):
            (directory / module.name).write_text(module.read_text(encoding="utf-8"), encoding="utf-8")
        self._process: subprocess.Popen[str] | None = None
        self._metrics = JsonTail(Path())
        self._step = 0

    def plant(self, code: str) -> None:
        """Python code that every process of the run executes at its start."""
        planted = self.outputs / "planted"
        planted.mkdir()
        (planted / "sitecustomize.py").write_text(code, encoding="utf-8")
        self.environment["PYTHONPATH"] = f"{REPOSITORY}:{planted}"

    def start(self) -> "SmallRun":
        command = [
            sys.executable,
            "-m",
            self.module,
            "train",
            str(self._config),
            "--run-dir",
            str(self.directory),
            "--json",
            # The config is known to be right: save its second in every test.
            "--no-preflight",
            "--dashboard" if self.has_dashboard else "--no-dashboard",
        ]
        for override in self.overrides:
            command += ["--set", override]
        command += self.options
        if self.machine is not None:
            command = self.machine.command(*command)
        # Files, not pipes: a long run would block when a pipe is full.
        with self._output("stdout").open("w") as out, self._output("stderr").open("w") as err:
            self._process = subprocess.Popen(
                command,
                stdout=out,
                stderr=err,
                text=True,
                cwd=REPOSITORY,
                env={**os.environ, **self.environment},
                start_new_session=True,
            )
        return self

    @property
    def process(self) -> subprocess.Popen[str]:
        assert self._process is not None
        return self._process

    def wait(self, timeout_s: float = LONG_S) -> dict[str, Any]:
        """Wait for the end; the summary that it printed, with its exit code and stderr."""
        self.process.wait(timeout_s)
        out, err = (self._output(name).read_text(encoding="utf-8") for name in ("stdout", "stderr"))
        lines = [line for line in out.splitlines() if line.startswith("{")]
        assert lines, f"exit code {self.process.returncode}\n{err[-4000:]}"
        summary: dict[str, Any] = json.loads(lines[-1])
        summary["exit_code"] = self.process.returncode
        summary["stderr"] = err
        return summary

    def pid(self, role: str) -> int | None:
        if role == "worker":
            workers = descendants_running("rollbook.rollout.workers.main", of=self.process.pid)
            return workers[0].pid if workers else None
        try:
            rows = json.loads((self.directory / "processes.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        if role == "supervisor":
            return int(rows["supervisor"])
        row = rows["processes"].get(role, {})
        return row.get("pid") if row.get("ready") else None

    def step(self) -> int:
        """The last step that was trained. Cheap: tests poll it, next to a run that needs the processors."""
        if self._metrics.path != (file := self.directory / "metrics.jsonl"):
            self._metrics = JsonTail(file)
        steps = [int(row["step"]) for row in self._metrics.poll() if row.get("process") == "trainer"]
        self._step = max(self._step, *steps, 0)
        return self._step

    def until(self, is_reached: Callable[[], Any], *, what: str, within_s: float = LONG_S) -> Any:
        """Wait for a state seen from outside. Fails with the output of the run if the run ends first."""
        until = time.monotonic() + within_s
        while time.monotonic() < until:
            if found := is_reached():
                return found
            if self.process.poll() is not None:
                out, err = (self._output(name).read_text(encoding="utf-8") for name in ("stdout", "stderr"))
                raise AssertionError(
                    f"the run ended with {self.process.returncode} before {what}\n{out}\n{err[-4000:]}"
                )
            time.sleep(0.02)
        raise AssertionError(f"{what} did not happen within {within_s} s; at step {self.step()}")

    def kill(self, role: str) -> int:
        """SIGKILL. Returns the pid that was killed."""
        pid: int = self.until(lambda: self.pid(role), what=f"{role} was up")
        os.kill(pid, signal.SIGKILL)
        return pid

    def descendants(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def stop(self) -> None:
        """SIGKILL to the supervisor. Returns when its processes have ended too: until then they write to the run directory."""
        if self._process is not None and self._process.poll() is None:
            processes = self.descendants()
            self._process.kill()
            self._process.wait()
            require_end(processes, within_s=END_S)

    def _output(self, name: str) -> Path:
        return self.outputs / name


def rollbook(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command line."""
    return subprocess.run(
        [sys.executable, "-m", "rollbook", *arguments], capture_output=True, text=True, check=False, cwd=REPOSITORY
    )
