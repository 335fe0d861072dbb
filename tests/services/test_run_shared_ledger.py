"""A run whose ledger is a PostgreSQL database, or a separate ledger service."""

import asyncio
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from rollbook.contracts.admission import LEASE_S
from rollbook.contracts.errors import RunError
from rollbook.ledger.client.client import open_ledger_client
from rollbook.run.directory import RunDirectory
from rollbook.run.reader import open_run
from tests.parts.ledger.groups import settings
from tests.parts.ledger.postgres import both_url, own_server, shared_server
from tests.parts.run.small import REPOSITORY, SmallRun, rollbook

STEPS = 8
SHORT = [f"trainer.max_steps={STEPS}", "trainer.checkpoint_every=2", "run.ready_s=600"]
pytestmark = pytest.mark.timeout(900)


class LedgerProcess:
    """`rollbook ledger serve` on one port over restarts."""

    def __init__(self, directory: Path, store: str) -> None:
        self._directory = directory
        self._store = store
        self.token_file = directory / "ledger-token"
        self._port = 0
        self.start()
        self._port = int(self.url.rpartition(":")[2])

    @property
    def url(self) -> str:
        return (self._directory / "ready").read_text(encoding="utf-8").strip()

    def start(self) -> None:
        ready = self._directory / "ready"
        ready.unlink(missing_ok=True)
        command = [sys.executable, "-m", "rollbook", "ledger", "serve", "--store", self._store]
        command += ["--port", str(self._port), "--token-file", str(self.token_file), "--ready-file", str(ready)]
        self.process = subprocess.Popen(command, cwd=REPOSITORY, stderr=subprocess.DEVNULL)
        while not ready.exists():
            assert self.process.poll() is None
            time.sleep(0.02)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def service(tmp_path: Path) -> Iterator[LedgerProcess]:
    (tmp_path / "service").mkdir()
    service = LedgerProcess(tmp_path / "service", f"sqlite:///{tmp_path}/service/ledger")
    yield service
    service.kill()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[SmallRun]:
    run = SmallRun(tmp_path, SHORT)
    yield run
    run.stop()


def require_complete(run: SmallRun) -> None:
    """The commands that read a run work with its ledger, and the run is complete."""
    directory = str(run.directory)
    audit = json.loads(rollbook("audit", directory, "--json").stdout)
    assert audit["ok"], audit["violations"]
    replayed = rollbook("replay", directory, "--verify", "--json")
    assert replayed.returncode == 0, replayed.stderr
    assert json.loads(replayed.stdout)["steps"] == STEPS
    with open_run(run.directory) as record:
        trained = [step.step for step in record.steps() if step.receipt == "acknowledged"]
        group = next(record.batches(1)).groups[0]
        assert record.samples(group.id) is not None
        assert record.status().ended
        with pytest.raises(RunError, match="no group"):
            record.explain(type(group.id)("missing@0"))
        with pytest.raises(RunError, match=f"batch {STEPS + 1}"):
            list(record.batches(STEPS + 1))
    assert trained == list(range(1, STEPS + 1))
    assert f"{STEPS} trained" in rollbook("inspect", directory).stdout
    assert group.id in rollbook("inspect", directory, "--groups").stdout
    assert "trained" in rollbook("explain", directory, group.id).stdout


@pytest.mark.slow
def test_a_run_on_postgresql_resumes_after_a_kill_and_every_reading_command_works(run: SmallRun) -> None:
    store = shared_server().fresh_url()
    payloads = run.directory.parent / "payloads"
    payloads.mkdir()
    run.overrides += [f"ledger.store={json.dumps(store)}", f"ledger.payloads={json.dumps(str(payloads))}"]
    run.start()
    run.until(lambda: run.step() >= 3, what="step 3")
    processes = run.descendants()
    run.process.send_signal(signal.SIGKILL)
    run.process.wait()
    _, alive = psutil.wait_procs(processes, timeout=20)
    assert alive == []
    summary = run.start().wait()
    assert (summary["exit_code"], summary["steps"], summary["audit"]) == (0, STEPS, "ok"), summary["stderr"]
    assert list((run.directory / "ledger").iterdir()) == []
    require_complete(run)


@pytest.mark.slow
def test_a_run_continues_at_a_synchronous_standby_when_its_database_is_lost(run: SmallRun) -> None:
    primary, standby = own_server(), own_server()
    standby.stop()
    standby.follow(primary)
    run.overrides.append(f"ledger.store={json.dumps(both_url(primary, standby))}")
    run.start()
    run.until(lambda: run.step() >= 3, what="step 3")
    primary.kill()
    time.sleep(2 * LEASE_S)  # as a manager of fail-overs that waits before it promotes
    standby.promote()
    summary = run.wait()
    assert (summary["exit_code"], summary["steps"], summary["audit"]) == (0, STEPS, "ok"), summary["stderr"]
    require_complete(run)
    standby.kill()


@pytest.mark.slow
def test_a_run_with_an_external_ledger_survives_a_kill_of_that_ledger(run: SmallRun, service: LedgerProcess) -> None:
    run.overrides += [f"ledger.url={service.url}", f"ledger.token_file={service.token_file}"]
    run.start()
    run.until(lambda: run.step() >= 3, what="step 3")
    service.kill()
    service.start()
    summary = run.wait()
    assert (summary["exit_code"], summary["steps"], summary["audit"]) == (0, STEPS, "ok"), summary["stderr"]
    assert "ledger" not in json.loads((run.directory / "processes.json").read_text())["processes"]
    require_complete(run)


@pytest.mark.slow
def test_a_process_that_joins_through_an_external_ledger_sends_its_telemetry(
    run: SmallRun, service: LedgerProcess
) -> None:
    run.overrides += [f"ledger.url={service.url}", f"ledger.token_file={service.token_file}"]
    run.overrides += ["cluster.allow_join=true", "trainer.max_steps=10_000", "env.pool_size=32"]
    run.start()
    run.until(lambda: run.step() >= 1, what="step 1")
    command = [sys.executable, "-m", "rollbook", "join", service.url, "--token-file", str(service.token_file)]
    command += ["--role", "env", "--name", "extra-env", "--source", str(run.directory.parent)]
    with subprocess.Popen(command, cwd=REPOSITORY, stderr=subprocess.PIPE, text=True) as env:
        log = run.directory / "logs" / "extra-env.jsonl"
        run.until(lambda: log.exists() and "env.serving" in log.read_text(encoding="utf-8"), what="its log arrived")
        own = RunDirectory(run.directory).on_this_machine("extra-env").log_file("extra-env")
        assert own.read_bytes().startswith(log.read_bytes())
        env.send_signal(signal.SIGINT)
        _, said = env.communicate()
    assert "left the run" in said


async def test_another_directory_cannot_continue_a_run_by_having_its_name(
    run: SmallRun, service: LedgerProcess
) -> None:
    token = service.token_file.read_text(encoding="ascii").strip()
    async with open_ledger_client(service.url, "small", token=token) as ledger:
        await ledger.create_run(replace(settings(), directory_id="another"))
    run.overrides += [f"ledger.url={service.url}", f"ledger.token_file={service.token_file}"]
    refused = await asyncio.to_thread(run.start().wait)
    assert refused["exit_code"] == 1
    assert "belongs to another run directory (its run.json has the id another)" in refused["stderr"]


def test_the_preflight_names_a_store_that_cannot_be_reached_and_what_a_fail_over_may_lose(tmp_path: Path) -> None:
    run = SmallRun(tmp_path)
    reached = rollbook("config", "check", str(run._config), "--set", f'ledger.store="{shared_server().fresh_url()}"')
    assert reached.returncode == 0, reached.stderr
    assert "has no synchronous standby" in reached.stderr
    store = "postgresql://user:secret-word@127.0.0.1:1/none"
    refused = rollbook("config", "check", str(run._config), "--set", f'ledger.store="{store}"')
    assert refused.returncode == 2
    assert "ledger.store" in refused.stderr
    assert "database none at 127.0.0.1:1: the database cannot be reached" in refused.stderr
    assert "secret-word" not in refused.stderr + refused.stdout
