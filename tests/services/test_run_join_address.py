"""`rollbook join LEDGER_URL`: a run is found through its ledger, and what is missing on the machine is named."""

import asyncio
import stat
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

from rollbook.access.tokens import read_token, write_token
from rollbook.commands.training.join import JoinOptions, JoinRole, join_address
from rollbook.concurrency.clock import ManualClock
from rollbook.contracts.admission import LEASE_S, RunId
from rollbook.contracts.errors import NotFoundError, UsageError
from rollbook.ledger.client.client import LedgerClient, open_ledger_client
from rollbook.ledger.http.auth import steering_keys
from rollbook.ledger.http.relay import Relay
from rollbook.ledger.http.wire import Announcement
from rollbook.run.config.run import load_config, load_resolved_config
from rollbook.run.directory import RunDirectory
from rollbook.run.members.announced_run import AnnouncedRun, AnnouncementWatch, LocalPaths, announcement_of, find_run
from tests.parts.ledger.groups import settings
from tests.parts.ledger.service import serving
from tests.parts.run.small import CONFIG, SmallRun

TOKEN = "token-of-the-ledger"
ADDRESSES = {"ledger": "http://127.0.0.1:1", "policy": "http://127.0.0.1:2"}
Overrides = tuple[str, ...]


def announcement(directory: Path, *overrides: str) -> Announcement:
    """Of a run directory as `rollbook train` prepares it."""
    directory.mkdir(exist_ok=True)
    SmallRun(directory)  # writes its modules
    (directory / "run.toml").write_text(CONFIG, encoding="utf-8")
    loaded = load_config(directory / "run.toml", overrides)
    run = RunDirectory(directory / "run")
    run.prepare()
    run.write_manifest(name="small", source_dir=directory)
    run.model.mkdir()
    (run.model / "tokenizer.json").write_text("{}", encoding="utf-8")
    run.record_model(run.model)
    return announcement_of(loaded.config, run, ADDRESSES)


@dataclass(frozen=True, slots=True)
class Service:
    url: str
    token_file: Path

    async def announce(self, name: str, announced: Announcement) -> None:
        async with self.client(name) as ledger:
            await ledger.create_run(settings())
            await ledger.announce(announced)

    def client(self, name: str) -> AbstractAsyncContextManager[LedgerClient]:
        return open_ledger_client(self.url, name, token=TOKEN)

    async def find(self, *, run: str | None = None, token_file: Path | None = None) -> AnnouncedRun:
        return await asyncio.to_thread(find_run, self.url, run=run, token_file=token_file or self.token_file)


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[Service]:
    write_token(tmp_path / "ledger-token", TOKEN)
    async with serving(tmp_path / "ledger", keys=steering_keys(TOKEN)) as (url, _):
        yield Service(url, tmp_path / "ledger-token")


async def test_the_only_run_of_a_ledger_is_found_and_several_must_be_named(service: Service, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"can be joined \(its runs: none\)"):
        await service.find()
    announced = announcement(tmp_path / "head")
    await service.announce("first", announced)
    assert (await service.find()).announcement == announced
    await service.announce("second", announced)
    with pytest.raises(UsageError, match=r"--run is required: .* has 2 runs \(first, second\)"):
        await service.find()
    assert (await service.find(run="second")).name == "second"
    with pytest.raises(UsageError, match="run third is not announced: it is not running"):
        await service.find(run="third")


async def test_a_wrong_or_missing_token_and_a_missing_ledger_are_named(
    service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await service.announce("first", announcement(tmp_path / "head"))
    write_token(tmp_path / "wrong", "another-token-of-a-ledger")
    with pytest.raises(UsageError, match=r"the access token is unknown to this ledger.* --token-file"):
        await service.find(token_file=tmp_path / "wrong")
    with pytest.raises(UsageError, match=r"requires an access token.* ROLLBOOK_TRAINER_TOKENS"):
        await asyncio.to_thread(find_run, service.url, run=None, token_file=None)
    monkeypatch.setenv("ROLLBOOK_TRAINER_TOKENS", TOKEN)
    found = await asyncio.to_thread(find_run, f"{service.url}/v1/runs/first", run=None, token_file=None)
    assert found.name == "first"
    monkeypatch.setattr("rollbook.run.members.announced_run.CONNECT_S", 0.2)
    with pytest.raises(UsageError, match="no ledger responds at"):
        await asyncio.to_thread(find_run, "http://127.0.0.1:9", run=None, token_file=None)


def test_the_announcement_has_no_secret_of_the_config_and_the_tokens_are_in_private_files(tmp_path: Path) -> None:
    secrets = (
        'ledger.store="postgresql://user:secret-word@db/x"',
        'env={url="http://127.0.0.1:3", token="secret-word"}',
    )
    announced = announcement(tmp_path / "head", *secrets)
    assert "secret-word" not in announced.config
    run = AnnouncedRun("small", announced, TOKEN)
    paths = LocalPaths(source_dir=tmp_path / "head")
    with run.directory("a-policy", "policy", paths) as directory:
        assert read_token(directory.token_file) == read_token(tmp_path / "head" / "run" / "token")
        assert read_token(directory.client_token_file) == read_token(tmp_path / "head" / "run" / "client-token")
        assert load_resolved_config(directory).config.run.name == "small"
        modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (directory.path, directory.config_file)}
        assert set(modes.values()) == {0o700, 0o600}
    assert not directory.path.exists()


def test_the_token_of_the_environment_server_is_read_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    announced = announcement(tmp_path / "head", 'env={url="http://127.0.0.1:3", token="secret-word"}')
    run, paths = AnnouncedRun("small", announced, TOKEN), LocalPaths(source_dir=tmp_path / "head")
    with pytest.raises(UsageError, match="set ROLLBOOK_ENV_TOKEN"), run.directory("a", "rollout", paths):
        pass
    monkeypatch.setenv("ROLLBOOK_ENV_TOKEN", "secret-word")
    with run.directory("a", "rollout", paths) as directory:
        token = load_resolved_config(directory).config.env.token
        assert token is not None
        assert token.get_secret_value() == "secret-word"


@pytest.mark.parametrize(
    ("role", "overrides", "missing"),
    [
        ("rollout", ('rollout.function="my_world:play"',), "rollout.function: .*my_world"),
        ("env", ('env.name="my_world:World"',), "env.name: .*my_world"),
        ("policy", ('model={path="models/mine"}',), "model.path: there is no directory"),
    ],
)
def test_files_that_are_not_on_this_machine_are_named(
    tmp_path: Path, role: str, overrides: Overrides, missing: str
) -> None:
    (tmp_path / "head").mkdir()
    # A name that no other test imports: `extend_search_path` leaves its directories in `sys.path`.
    (tmp_path / "head" / "my_world.py").write_text("class World: ...\ndef play(): ...\n", encoding="utf-8")
    run = AnnouncedRun("small", announcement(tmp_path / "head", *overrides), TOKEN)
    (tmp_path / "empty").mkdir()
    paths = LocalPaths(source_dir=tmp_path / "empty")
    refused = pytest.raises(UsageError, match=f"lacks files that the role {role} needs(?s:.*){missing}")
    with refused, run.directory("a", role, paths):
        pass


def test_a_model_with_another_tokenizer_is_refused(tmp_path: Path) -> None:
    run = AnnouncedRun("small", announcement(tmp_path / "head"), TOKEN)
    run.require_tokenizer(tmp_path / "head" / "run" / "model")
    (tmp_path / "tokenizer.json").write_text('{"other": 1}', encoding="utf-8")
    with pytest.raises(UsageError, match=r"its tokenizer.json differs"):
        run.require_tokenizer(tmp_path)


async def test_another_version_another_network_and_a_rank_are_refused(service: Service, tmp_path: Path) -> None:
    def join(role: JoinRole, host: str = "127.0.0.1") -> str:
        options = JoinOptions(role=role, host=host, name="a")
        paths = LocalPaths(source_dir=tmp_path / "head")
        return join_address(service.url, options, run=None, token_file=service.token_file, paths=paths, say=print)

    announced = announcement(tmp_path / "head", "cluster.allow_join=true", 'inference.transfer="directory"')
    await service.announce("small", announced)
    with pytest.raises(UsageError, match="a trainer rank joins with the run directory"):
        await asyncio.to_thread(join, JoinRole.RANK)
    with pytest.raises(UsageError, match="one could not reach the other"):
        await asyncio.to_thread(join, JoinRole.POLICY, "10.0.0.9")
    with pytest.raises(UsageError, match=r"inference.transfer = 'directory' passes weights on the trainer's machine"):
        await asyncio.to_thread(join, JoinRole.POLICY)
    await service.announce("small", msgspec.structs.replace(announced, version="0.0.1"))
    with pytest.raises(UsageError, match=r"uses Rollbook 0\.0\.1, and this machine has"):
        await asyncio.to_thread(join, JoinRole.POLICY)


def test_an_announcement_ends_when_it_is_not_repeated(tmp_path: Path) -> None:
    clock = ManualClock()
    relay, run = Relay(clock), RunId("small")
    relay.announce(run, announcement(tmp_path / "head"))
    clock.jump(LEASE_S - 0.1)
    assert relay.announced() == [run]
    clock.jump(0.1)
    assert relay.announced() == []
    with pytest.raises(NotFoundError, match="run small is not announced"):
        relay.announcement(run)


async def test_a_run_with_other_addresses_is_another_one(service: Service, tmp_path: Path) -> None:
    announced = announcement(tmp_path / "head")
    await service.announce("small", announced)
    watch = AnnouncementWatch(announced, is_own_ledger=False, silent_s=0.0)
    async with service.client("small") as ledger:
        assert await watch.is_running(ledger)
        await ledger.announce(msgspec.structs.replace(announced, addresses={"ledger": "http://127.0.0.1:5"}))
        assert not await watch.is_running(ledger)


async def test_a_run_whose_own_ledger_refuses_connections_has_stopped(
    service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    announced = msgspec.structs.replace(announcement(tmp_path / "head"), addresses={"ledger": "http://127.0.0.1:9"})
    await service.announce("small", announced)
    async with service.client("small") as ledger:
        watch = AnnouncementWatch(announced, is_own_ledger=True, silent_s=100.0)
        assert await watch.is_running(ledger)  # it may be a moment
        monkeypatch.setattr("rollbook.run.members.announced_run.REFUSED_S", 0.0)
        assert not await watch.is_running(ledger)
        external = AnnouncementWatch(announced, is_own_ledger=False, silent_s=100.0)
        assert await external.is_running(ledger)
