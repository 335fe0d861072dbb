"""Drains, signals, deaths and actions while a run starts. The supervisor and the ledger are real, the other roles are scripted."""

import asyncio
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from rollbook.contracts.admission import ActionKind, GateState, LedgerStatus
from rollbook.ledger.rules import runs
from rollbook.ledger.stores.registry import only_service, open_reader, sqlite_url
from rollbook.run.actions import act
from rollbook.run.config.run import RunConfig
from rollbook.run.directory import RunDirectory
from rollbook.run.supervision import drain
from rollbook.run.supervision import supervisor as supervisor_module
from rollbook.run.supervision.supervisor import RunEnd, Supervisor
from tests.parts.run.scripted_run import MODULES, make_ready, pids, prepared, supervised, until

pytestmark = pytest.mark.usefixtures("forked_processes")
FORKED = MODULES
LIMIT_S = 300.0
"""For the end of a run. On a machine with a load of 20 two starts took 30 s."""


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    return prepared(tmp_path)


@pytest.fixture
def directory(config: RunConfig, tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path / "run")


@pytest.fixture(autouse=True)
def _quick_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drain, "POLL_S", 0.05)


def status(directory: RunDirectory) -> LedgerStatus:
    with open_reader(sqlite_url(directory.ledger)) as reader:
        return reader.read_now(lambda tx: runs.status(tx, tx.runs.ids()[0]))


def kinds(directory: RunDirectory) -> list[str]:
    with open_reader(sqlite_url(directory.ledger)) as reader:
        found = reader.read_now(lambda tx: tx.actions.page(tx.runs.ids()[0], limit=10))
    return [str(action.kind) for action in found]


def files_of(supervisor: Supervisor, role: str) -> list[str]:
    """The files that the process has opened."""
    pid = next(process.pid for process in supervisor.processes if process.role == role)
    with suppress(psutil.Error):
        return [] if pid is None else [file.path for file in psutil.Process(pid).open_files()]
    return []


def running_roles() -> set[str]:
    """The roles that child processes of this one play."""
    lines = [child.cmdline() for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE]
    return {line[line.index("--role") + 1] for line in lines if "--role" in line}


@pytest.mark.parametrize("dies", [False, True], ids=["once", "and the trainer dies while it stops"])
async def test_a_drain_that_is_complete_before_the_trainer_is_ready_is_a_drain(
    config: RunConfig, directory: RunDirectory, dies: bool
) -> None:
    make_ready(directory, "policy", "rollout")
    if dies:
        (directory.path / "dies-trainer").touch()
    async with supervised(config, directory, lambda text: make_ready(directory, "trainer")) as (_, running):
        await act(str(directory.path), ActionKind.DRAIN, author="Ada")  # waits until the ledger serves
        outcome = await running
    assert (outcome.end, outcome.message, outcome.restarts) == (RunEnd.DRAINED, "stopped", int(dies))
    assert kinds(directory) == ["drain", "drained"]
    if not dies:
        async with supervised(config, directory):
            await until(lambda: status(directory).gate is not GateState.DRAINING)


async def test_the_next_supervisor_completes_a_drain_when_the_trainer_did_not_stop(
    config: RunConfig, directory: RunDirectory
) -> None:
    make_ready(directory, "policy", "rollout")
    noticed = asyncio.Event()
    async with supervised(config, directory, lambda text: noticed.set()) as (_, running):
        await act(str(directory.path), ActionKind.DRAIN, author="Ada")
        await noticed.wait()
    assert (await running).end is RunEnd.INTERRUPTED
    assert kinds(directory) == ["drain"]
    async with supervised(config, directory, lambda text: make_ready(directory, "trainer")) as (_, running):
        assert (await running).end is RunEnd.DRAINED
    assert kinds(directory) == ["drain", "drained"]


async def test_an_interrupt_before_the_trainer_is_ready_stops_the_run_at_once(
    config: RunConfig, directory: RunDirectory
) -> None:
    async with supervised(config, directory) as (supervisor, running):
        supervisor.interrupt()
        outcome = await running
    assert (outcome.end, outcome.message) == (RunEnd.INTERRUPTED, "stopped at once")


async def test_an_interrupt_stops_a_run_with_an_external_trainer_that_has_not_ended_it(
    config: RunConfig, directory: RunDirectory
) -> None:
    async def until_the_trainer_ends_the_run(addresses: Mapping[str, str]) -> None:
        await asyncio.Event().wait()

    make_ready(directory, "policy", "rollout")
    options: dict[str, Any] = {"has_trainer": False, "until_over": until_the_trainer_ends_the_run}
    async with supervised(config, directory, **options) as (supervisor, running), asyncio.timeout(LIMIT_S):
        await until(lambda: any(p.role == "rollout" and p.ready.is_set() for p in supervisor.processes))
        supervisor.interrupt()
        outcome = await running
    assert outcome.end is RunEnd.DRAINED


async def test_the_message_of_an_interrupted_run_is_not_that_of_an_earlier_trainer(
    config: RunConfig, directory: RunDirectory
) -> None:
    make_ready(directory, "policy", "rollout", "trainer")
    async with supervised(config, directory) as (supervisor, running):
        trainer = next(p for p in supervisor.processes if p.role == "trainer")
        await trainer.ready.wait()
        trainer.request_stop()  # as another program would
        await until(lambda: trainer.restarts == 1)
        (directory.path / "dies-trainer").touch()  # the second one ends without a message
        supervisor.interrupt()
        supervisor.interrupt()
        outcome = await running
    assert (outcome.end, outcome.message) == (RunEnd.INTERRUPTED, "stopped at once")


async def test_a_run_that_is_stopped_at_once_starts_nothing_again(
    config: RunConfig, directory: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def ends_slowly(*args: object, **options: object) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.5)

    monkeypatch.setattr(supervisor_module, "until_drained", ends_slowly)
    make_ready(directory, "policy", "rollout", "trainer")
    said: list[str] = []
    async with supervised(config, directory, said.append) as (supervisor, running):
        for process in supervisor.processes:
            await process.ready.wait()
        supervisor.interrupt()
        supervisor.interrupt()
        await running
    assert not [text for text in said if "started again" in text]


async def test_an_interrupt_stops_the_preparation_of_the_model(config: RunConfig, directory: RunDirectory) -> None:
    directory.model_file.unlink()
    async with supervised(config, directory) as (supervisor, running), asyncio.timeout(LIMIT_S):
        await until(lambda: "prepare" in running_roles())
        supervisor.interrupt()
        outcome = await running
    assert (outcome.end, outcome.message) == (RunEnd.INTERRUPTED, "stopped at once")


async def test_a_run_starts_when_an_action_or_the_ledger_of_a_killed_run_has_released_the_store(
    config: RunConfig, directory: RunDirectory
) -> None:
    with ExitStack() as held:
        held.enter_context(only_service(sqlite_url(directory.ledger)))
        async with supervised(config, directory) as (supervisor, running):
            lock = str(directory.ledger / "service.lock")
            await until(lambda: running.done() or lock in files_of(supervisor, "ledger"))
            held.close()
            await act(str(directory.path), ActionKind.PAUSE, author="Ada")
            assert status(directory).gate is GateState.PAUSED


async def test_an_action_waits_until_the_ledger_of_a_killed_run_has_ended(
    config: RunConfig, directory: RunDirectory
) -> None:
    async with supervised(config, directory):
        await act(str(directory.path), ActionKind.PAUSE, author="Ada")
        addresses = directory.addresses_file.read_bytes()
    # A killed supervisor leaves its addresses behind.
    directory.addresses_file.write_bytes(addresses)
    with directory.locked(), only_service(sqlite_url(directory.ledger)):
        acting = asyncio.create_task(act(str(directory.path), ActionKind.RESUME, author="Ada"))
        await asyncio.sleep(0)
    assert (await acting).number == 1
    assert kinds(directory) == ["pause", "resume"]


async def test_a_process_that_keeps_crashing_is_reported_and_stops_the_run(
    config: RunConfig, directory: RunDirectory
) -> None:
    make_ready(directory, "policy")
    (directory.path / "crashes-policy").write_text("OutOfMemoryError: too large\nmore", encoding="utf-8")
    settings = config.run.model_copy(update={"most_quick_deaths": 1})
    config = config.model_copy(update={"run": settings})
    said: list[str] = []
    async with supervised(config, directory, said.append) as (supervisor, running):
        outcome = await running
    assert said == ["policy exited with status 1: OutOfMemoryError: too large; it is started again"]
    assert outcome.end is RunEnd.FAILED
    assert (
        "policy exited with status 1: OutOfMemoryError: too large; it died 2 times in a row within 15 s of being ready"
        in outcome.message
    )
    (policy,) = (process for process in supervisor.processes if process.role == "policy")
    assert len(policy.lifetimes_s) == 2


async def test_the_time_that_a_process_takes_to_start_is_not_part_of_its_life(
    config: RunConfig, directory: RunDirectory
) -> None:
    async with supervised(config, directory) as (supervisor, _):
        (policy,) = (process for process in supervisor.processes if process.role == "policy")
        await until(lambda: policy.pid is not None)
        policy.kill()
        await until(lambda: bool(policy.lifetimes_s))
        assert policy.lifetimes_s[0] == 0.0


def with_base(config: RunConfig) -> RunConfig:
    return config.model_copy(update={"resources": config.resources.model_copy(update={"shared_base": True})})


async def test_the_death_of_the_shared_base_restarts_all_that_map_it_and_no_other_death_does(
    config: RunConfig, directory: RunDirectory
) -> None:
    make_ready(directory, "policy", "rollout", "trainer")
    said: list[str] = []
    async with supervised(with_base(config), directory, said.append) as (supervisor, _), asyncio.timeout(LIMIT_S):
        of = {process.role: process for process in supervisor.processes}
        mapping = {of["policy"], of["trainer"]}
        await of["rollout"].ready.wait()
        assert [process.pid for process in mapping] == [None, None], "they wait for the base"
        make_ready(directory, "base")
        await asyncio.gather(*(process.ready.wait() for process in of.values()))
        for role in ("trainer", "policy"):
            before = pids(supervisor)
            of[role].kill()
            await until(lambda role=role, before=before: of[role].pid not in (None, before[role]))  # type: ignore[misc]
            await of[role].ready.wait()
            assert {**pids(supervisor), role: None} == {**before, role: None}
        (directory.path / "ready-base").unlink()
        before = pids(supervisor)
        of["base"].kill()
        await until(lambda: of["base"].pid not in (None, before["base"]))
        assert [process.pid for process in mapping] == [None, None], "they ended before the base is loaded again"
        make_ready(directory, "base")
        await asyncio.gather(*(process.ready.wait() for process in mapping))
        after = pids(supervisor)
        assert {role for role in after if after[role] != before[role]} == {"base", "policy", "trainer"}
        assert {process.role: len(process.lifetimes_s) for process in of.values() if process.lifetimes_s} == {
            "base": 1,
            "policy": 1,
            "trainer": 1,
        }, "the death of another process does not count"
        assert sorted(process.restarts for process in of.values()) == [0, 0, 1, 2, 2]
    assert "trainer was ended, because the process that owns its base died; it is started again" in said


async def test_a_base_that_was_changed_fails_the_run_at_its_end_after_all_that_map_it_have_stopped(
    config: RunConfig, directory: RunDirectory
) -> None:
    make_ready(directory, "base", "policy", "rollout", "trainer")
    (directory.path / "faults-base").write_text("the shared base was changed", encoding="utf-8")
    async with supervised(with_base(config), directory) as (supervisor, running), asyncio.timeout(LIMIT_S):
        of = {process.role: process for process in supervisor.processes}
        await asyncio.gather(*(process.ready.wait() for process in of.values()))
        await act(str(directory.path), ActionKind.DRAIN, author="Ada")
        outcome = await running
    assert (outcome.end, outcome.message) == (RunEnd.FAILED, "base: the shared base was changed")
    assert [process.role for process in supervisor.processes][:3] == ["base", "ledger", "policy"], "stopped in reverse"
