"""A run on two machines with their own addresses, without Ray: the second one joins through the address of the ledger.

The short form of `make test-cluster`. The machines are network namespaces; the second one does not see the run directory.
"""

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from rollbook.telemetry.json_tail import JsonTail
from tests.parts.run.network import Machine, machines
from tests.parts.run.small import EXAMPLE, REPOSITORY, SmallRun, rollbook

pytestmark = pytest.mark.timeout(600)
ROLES = ("policy", "rollout")


@pytest.fixture
def pair() -> Iterator[Sequence[Machine]]:
    with machines(2) as made:
        yield made


@pytest.fixture
def run(tmp_path: Path, pair: Sequence[Machine]) -> Iterator[SmallRun]:
    settings = [f"cluster.host={json.dumps(pair[0].address)}", "cluster.allow_join=true", "trainer.max_steps=10_000"]
    # Slow episodes leave the processors to the processes that start.
    run = SmallRun(tmp_path, [*settings, "env.args.step_s=0.3"])
    run.machine = pair[0]
    run.start()
    run.until(lambda: run.step() >= 1, what="step 1")
    yield run
    run.stop()


@contextmanager
def joined(machine: Machine, run: SmallRun, role: str) -> Iterator["subprocess.Popen[str]"]:
    """Joins from a directory with copies of the user's modules, the model and the token. A mount hides the run directory."""
    home = run.directory.parent / f"machine-{role}"
    home.mkdir()
    for module in EXAMPLE.glob("*.py"):
        shutil.copy(module, home)
    shutil.copy(run.directory / "token", home)
    address = json.loads((run.directory / "addresses.json").read_text(encoding="utf-8"))["ledger"]
    shutil.copytree(run.directory / "model", home / "model")
    options = ["--name", f"second-{role}", "--host", machine.address, "--token-file", "token", "--model", "model"]
    hidden = 'mount -t tmpfs tmpfs "$1" && test -z "$(ls "$1")" && shift && cd "$1" && shift && exec "$@"'
    command = [sys.executable, "-m", "rollbook", "join", address, "--role", role, *options]
    process = subprocess.Popen(
        machine.command(
            *("env", f"PYTHONPATH={REPOSITORY}", "unshare", "--mount", "sh", "-ec", hidden, "sh"),
            *(str(run.directory), str(home), *command),
        ),
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def rows(run: SmallRun, file: str) -> list[dict[str, object]]:
    return list(JsonTail(run.directory / file).poll())


def members(run: SmallRun) -> dict[str, dict[str, object]]:
    found: dict[str, dict[str, object]] = json.loads((run.directory / "processes.json").read_text())["members"]
    return found


def accepted(run: SmallRun) -> float:
    """Groups of the second machine's dispatcher."""
    found = rows(run, "metrics-second-rollout.jsonl")
    return max((float(str(row.get("rollout/accepted_groups") or 0)) for row in found), default=0.0)


@pytest.mark.slow
def test_a_machine_that_sees_no_run_directory_joins_and_serves(run: SmallRun, pair: Sequence[Machine]) -> None:
    with ExitStack() as stack:
        processes = {role: stack.enter_context(joined(pair[1], run, role)) for role in ROLES}
        run.until(lambda: len(members(run)) == len(ROLES), what="all roles have joined")
        run.until(lambda: accepted(run) >= 1, what="the dispatcher played a group")
        run.until(lambda: rows(run, "spans/second-policy.jsonl"), what="the policy server generated tokens")
        assert str(members(run)["second-policy"]["address"]).startswith(f"http://{pair[1].address}:")
        processes["policy"].send_signal(signal.SIGINT)
        _, said = processes["policy"].communicate(timeout=120)
        assert (processes["policy"].returncode, "left the run" in said) == (0, True), said
        run.stop()
    audit = json.loads(rollbook("audit", str(run.directory), "--json").stdout)
    assert audit["ok"], audit["violations"]
    assert audit["max_lag"] <= audit["max_head_offpolicy_versions"]
