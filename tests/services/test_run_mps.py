"""The MPS server of a run: started, watched, and ended with it. Its program is a stand-in; the other roles are scripted."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from rollbook.run.config.run import RunConfig, load_resolved_config
from rollbook.run.directory import RunDirectory
from rollbook.run.resources.mps import PIPES, PROGRAM, has_clients, kill_programs, mps_directory
from rollbook.run.supervision.exits import EXIT_STOP_RUN
from rollbook.run.supervision.host import HostedProcess, ProcessStart
from rollbook.run.supervision.process import SupervisedProcess
from rollbook.run.supervision.supervisor import RunEnd, Supervisor
from tests.parts.concurrency.processes import REPOSITORY, require_end
from tests.parts.run.mps_stand_in import install
from tests.parts.run.scripted_run import MODULES, ScriptedHost, make_ready, pids, prepared, supervised, until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="MPS is of Linux")
FORKED = (*MODULES, "rollbook.run.processes.mps")


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunDirectory]:
    """Of a run with an MPS server, whose scripted processes become ready."""
    for name, value in install(tmp_path / "bin").items():
        monkeypatch.setenv(name, value)
    prepared(tmp_path, ["resources.mps=true"])
    directory = RunDirectory(tmp_path / "run")
    make_ready(directory, "policy", "rollout", "trainer")
    yield directory
    assert kill_programs(mps_directory(directory)) == [], "nothing is left over"


def serving(place: Path) -> list[int]:
    """The control program and its server."""
    control = int((place / f"{PROGRAM}.pid").read_text(encoding="ascii"))
    (server,) = psutil.Process(control).children()
    return [control, server.pid]


def variable(pid: int | None) -> str | None:
    return psutil.Process(pid).environ().get(PIPES)


def config_of(directory: RunDirectory) -> RunConfig:
    return load_resolved_config(directory).config


async def all_ready(supervisor: Supervisor) -> None:
    await until(lambda: all(process.ready.is_set() for process in supervisor.processes))


@pytest.mark.parametrize("start", ["forked", "plain"])
async def test_trainer_and_policy_servers_are_clients_and_the_server_ends_after_them(
    directory: RunDirectory,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
    start: str,
) -> None:
    if start == "forked":
        request.getfixturevalue("forked_processes")
    monkeypatch.setenv(PIPES, others := str(tmp_path / "of the user"))
    config, place = config_of(directory), mps_directory(directory)
    async with supervised(config, directory, real=["mps"]) as (supervisor, running), asyncio.timeout(60):
        await all_ready(supervisor)
        assert has_clients(place)
        if start == "plain":  # otherwise the process table has the environment of the template
            assert {variable(pids(supervisor)[role]) for role in ("trainer", "policy")} == {str(place)}
            assert {variable(pids(supervisor)[role]) for role in ("ledger", "rollout", "mps")} == {others}
        (mps,) = (process for process in supervisor.processes if process.role == "mps")
        assert others in mps.doing, "the other server is named"
        # A batch system sends it to all processes at once.
        programs, owner = serving(place), pids(supervisor)["mps"]
        assert owner is not None
        os.kill(owner, signal.SIGTERM)
        await asyncio.sleep(1.0)
        assert (serving(place), pids(supervisor)["mps"]) == (programs, owner), (
            "the trainer may still write a checkpoint"
        )
        supervisor.interrupt()
        assert (await running).end is RunEnd.DRAINED
    assert not place.exists()
    log = (directory.logs / "mps-control.log").read_text(encoding="utf-8").splitlines()
    assert log[0].startswith("start_server -uid")
    assert log[-1] == "quit"


async def test_a_client_dies_alone_and_the_server_with_all_its_clients(directory: RunDirectory) -> None:
    said: list[str] = []
    place = mps_directory(directory)
    async with supervised(config_of(directory), directory, said.append, real=["mps"]) as (supervisor, _):
        for victim in ("trainer", "control program", "server", "mps", "fault of a client"):
            await all_ready(supervisor)
            before, programs = pids(supervisor), serving(place)
            old = [psutil.Process(pid) for pid in programs]
            victims = {**before, "control program": programs[0], "server": programs[1]}
            said.clear()
            if victim == "fault of a client":
                (place / "fault").touch()
            else:
                pid = victims[victim]
                assert pid is not None
                os.kill(pid, signal.SIGKILL)
            is_client = victim in before and victim != "mps"
            ended = [victim] if is_client else ["mps", "policy", "trainer"]
            await until(lambda: all(pids(supervisor)[role] not in (None, before[role]) for role in ended))  # noqa: B023
            await all_ready(supervisor)
            after = pids(supervisor)
            assert {role for role in after if after[role] != before[role]} == set(ended)
            if is_client:
                assert serving(place) == programs
            else:
                require_end(old, within_s=30)  # even a server whose control program died
                cause = {
                    "control program": f"{PROGRAM} was killed by signal 9",
                    "server": f"its server (pid {programs[1]}) died",
                    "mps": "mps was killed by signal 9",
                    "fault of a client": "one had an error on the GPU",
                }[victim]
                assert any(cause in text for text in said)
                assert "trainer was ended, because the MPS server of the run died; it is started again" in said
        lives = {process.role: len(process.lifetimes_s) for process in supervisor.processes if process.lifetimes_s}
        assert lives == {"mps": 4, "trainer": 1}, "clients were not at fault when the server died"


async def test_a_client_that_is_being_started_when_the_server_dies_is_started_again(
    directory: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, is_starting = ScriptedHost.start, asyncio.Event()

    async def first_waits(host: ScriptedHost, process: ProcessStart) -> HostedProcess:
        if process.role == "trainer" and not is_starting.is_set():
            is_starting.set()
            await asyncio.Event().wait()
        return await start(host, process)

    monkeypatch.setattr(ScriptedHost, "start", first_waits)
    async with supervised(config_of(directory), directory, real=["mps"]) as (supervisor, _), asyncio.timeout(60):
        await is_starting.wait()
        os.kill(serving(mps_directory(directory))[0], signal.SIGKILL)
        await all_ready(supervisor)
        (trainer,) = (process for process in supervisor.processes if process.role == "trainer")
        assert trainer.lifetimes_s == [], "it was not at fault"


def owner_of(directory: RunDirectory) -> SupervisedProcess:
    return SupervisedProcess(ProcessStart(name="mps", role="mps", directory=directory))


@pytest.mark.parametrize(
    ("failure", "cause"),
    [("dies", "exited with status 1"), ("no_server", "it started no server within 1 s"), (None, "is not on the PATH")],
)
async def test_a_server_that_does_not_come_up_reports_the_cause_and_what_to_do(
    directory: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: str | None, cause: str
) -> None:
    if failure is None:
        (tmp_path / "bin" / PROGRAM).unlink()
    else:
        monkeypatch.setenv("STAND_IN", failure)
    planted = tmp_path / "planted"
    planted.mkdir()
    (planted / "sitecustomize.py").write_text(
        "import sys\nif 'mps' in sys.argv:\n    from rollbook.run.processes import mps\n    mps.START_S = 1.0\n",
        encoding="utf-8",
    )
    monkeypatch.setenv("PYTHONPATH", f"{REPOSITORY}:{planted}")
    owner = owner_of(directory)
    code = await owner.run()
    assert code == EXIT_STOP_RUN, owner.fault or owner.last_output()
    assert owner.fault is not None
    assert owner.fault.startswith("nvidia-cuda-mps-control")
    assert cause in owner.fault
    assert "or set resources.mps = false" in owner.fault
    if failure == "no_server":
        assert "control.log: start_server" in owner.fault, "the end of its log"


@pytest.mark.parametrize("setting", ["true", "optional"])
async def test_a_run_ends_without_the_server_that_it_requires_and_goes_on_without_an_optional_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: str
) -> None:
    for name, value in {**install(tmp_path / "bin"), "STAND_IN": "dies"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv(PIPES, raising=False)
    config = prepared(tmp_path, [f"resources.mps={setting}"])
    directory, said = RunDirectory(tmp_path / "run"), list[str]()
    make_ready(directory, "policy", "rollout", "trainer")
    async with (
        supervised(config, directory, said.append, real=["mps"]) as (supervisor, running),
        asyncio.timeout(60),
    ):
        if setting == "true":
            outcome = await running
            assert outcome.end is RunEnd.FAILED
            assert "mps stopped the run: nvidia-cuda-mps-control -f cannot be used: it exited with status 1" in (
                outcome.message
            )
            return
        await until(lambda: all(p.ready.is_set() for p in supervisor.processes if p.role != "mps"))
        assert [variable(pids(supervisor)[role]) for role in ("trainer", "policy")] == [None, None]
        (text,) = [text for text in said if text.startswith("mps stopped:")]
        assert "training continues without it, and trainer and policy servers take turns on the GPU" in text
        # No other process ends with a server that was given up.
        trainer = pids(supervisor)["trainer"]
        assert trainer is not None
        os.kill(trainer, signal.SIGKILL)
        await until(lambda: pids(supervisor)["trainer"] not in (None, trainer))
        await until(lambda: all(p.ready.is_set() for p in supervisor.processes if p.role != "mps"))
        supervisor.interrupt()
        assert (await running).end is RunEnd.DRAINED


async def test_an_optional_server_that_keeps_dying_is_given_up_and_its_clients_start_again_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in install(tmp_path / "bin").items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv(PIPES, raising=False)
    config = prepared(tmp_path, ["resources.mps=optional", "run.most_quick_deaths=0"])
    directory, said = RunDirectory(tmp_path / "run"), list[str]()
    make_ready(directory, "policy", "rollout", "trainer")
    async with (
        supervised(config, directory, said.append, real=["mps"]) as (supervisor, running),
        asyncio.timeout(60),
    ):
        await all_ready(supervisor)
        before = pids(supervisor)
        os.kill(serving(mps_directory(directory))[0], signal.SIGKILL)
        clients = ("trainer", "policy")
        await until(lambda: all(pids(supervisor)[role] not in (None, before[role]) for role in clients))
        await until(lambda: all(p.ready.is_set() for p in supervisor.processes if p.role != "mps"))
        assert [variable(pids(supervisor)[role]) for role in clients] == [None, None]
        assert pids(supervisor)["rollout"] == before["rollout"]
        assert any("it died 1 times in a row" in text and "training continues without it" in text for text in said)
        lives = {process.role: process.lifetimes_s for process in supervisor.processes if process.role in clients}
        assert lives == {"trainer": [], "policy": []}, "the clients were not at fault"
        supervisor.interrupt()
        assert (await running).end is RunEnd.DRAINED


SUPERVISOR = """
import asyncio, sys
from pathlib import Path
from rollbook.run.directory import RunDirectory
from tests.services.test_run_mps import owner_of

async def main(directory):
    owner = owner_of(directory)
    running = asyncio.create_task(owner.run())
    await owner.ready.wait()
    print(owner.pid, flush=True)
    await running

asyncio.run(main(RunDirectory(Path(sys.argv[1]))))
"""


def test_nothing_is_left_when_the_supervisor_is_killed_even_together_with_the_owner_of_the_server(
    directory: RunDirectory,
) -> None:
    place = mps_directory(directory)
    left: list[psutil.Process] = []
    for is_killed_with_owner in (True, False):
        with subprocess.Popen(
            [sys.executable, "-c", SUPERVISOR, str(directory.path)],
            stdout=subprocess.PIPE,
            cwd=REPOSITORY,
            env={**os.environ, "PYTHONPATH": REPOSITORY},
        ) as process:
            assert process.stdout is not None
            owner = psutil.Process(int(process.stdout.readline()))
            programs = [psutil.Process(pid) for pid in serving(place)]
            # The next start ends a server that has a session of its own.
            require_end(left, within_s=30)
            process.kill()
            if is_killed_with_owner:
                owner.kill()
        left = programs[1:]
        require_end([owner, programs[0]], within_s=60)
    require_end(left, within_s=30)
    assert not place.exists()
