"""A run that is found through its ledger: what `rollbook join LEDGER_URL` uses in place of the run directory.

The supervisor announces its run in the ledger's service. On the machine of a member the announcement becomes a small
private directory with the same layout as the run directory. Models and users' modules are looked up on this machine.
"""

import asyncio
import hashlib
import os
import shutil
import time
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import tomli_w

from rollbook import __version__
from rollbook.access.private_files import make_private_directory
from rollbook.access.tokens import read_token, write_token
from rollbook.contracts.admission import BEATS_PER_LEASE, LEASE_S
from rollbook.contracts.errors import NotFoundError, RollbookError, RunError, TransientError, UsageError
from rollbook.contracts.plugin import load_on_demand
from rollbook.ledger.client.blocking import open_sync_ledger_client, split_address
from rollbook.ledger.client.client import LedgerClient
from rollbook.ledger.config import RunLedgerConfig
from rollbook.ledger.http.wire import Announcement
from rollbook.run.config.run import LoadedConfig, RunConfig, dump_toml
from rollbook.run.config.user_files import missing_files
from rollbook.run.directory import RunDirectory, machine_directory, write_json
from rollbook.run.ledger_clients import open_run_ledger
from rollbook.telemetry.events import EventLog

TOKEN_VARIABLE = "ROLLBOOK_TRAINER_TOKENS"
ENV_TOKEN_VARIABLE = "ROLLBOOK_ENV_TOKEN"
CONNECT_S = 10.0
"""A person waits for the response."""
GONE_S = 2 * LEASE_S
"""A run that has not been announced for this long has stopped. A restarted ledger gets the announcement again within seconds."""
REFUSED_S = 3.0
FILES_OF_ROLE = {"policy": ("inference",), "rollout": ("tasks", "rollout", "env"), "env": ("env",)}
"""Sections of the config that name files and modules which a role loads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalPaths:
    """Where this machine has what the run's config names."""

    source_dir: Path
    """Users' modules, task files and a relative `model.path` are looked up here."""
    model: Path | None = None
    """The model directory, if `model.path` of the run names none here."""


@dataclass(frozen=True, slots=True)
class AnnouncedRun:
    name: str
    announcement: Announcement
    token: str | None
    """Opens the ledger."""

    @contextmanager
    def directory(self, member: str, role: str, paths: LocalPaths) -> Iterator[RunDirectory]:
        """The directory of the member on this machine. It holds tokens and is removed at the end.

        Raises `UsageError` if files that the role needs are not on this machine.
        """
        known = self.announcement
        local = machine_directory(known.directory_id, member)
        directory = RunDirectory(local / "run")
        shutil.rmtree(directory.path, ignore_errors=True)  # of a member that was killed
        make_private_directory(directory.path)
        try:
            table = self._config(paths, role)
            for name, token in known.tokens.items():
                write_token(directory.path / Path(name).name, token)
            if table["ledger"].get("url") and self.token is not None:
                write_token(directory.path / "ledger-token", self.token)
                table["ledger"]["token_file"] = str(directory.path / "ledger-token")
            directory.config_file.touch(mode=0o600)
            directory.config_file.write_text(tomli_w.dumps(table), encoding="utf-8")
            write_json(
                directory.manifest_file,
                {
                    "name": self.name,
                    "id": known.directory_id,
                    "rollbook": __version__,
                    "created": time.time(),
                    "source_dir": str(paths.source_dir),
                },
            )
            _require_files(RunConfig.model_validate(table), role, paths)
            yield directory
        finally:
            shutil.rmtree(directory.path, ignore_errors=True)

    def require_tokenizer(self, model_dir: Path) -> None:
        """Raises `UsageError` if the model on this machine has another tokenizer than that of the run."""
        if tokenizer_digest(model_dir) != self.announcement.tokenizer_digest:
            raise UsageError(
                f"the model in {model_dir} is not that of the run: its tokenizer.json differs. Copy the model of the run to this "
                "machine, and name its directory with --model"
            )

    def _config(self, paths: LocalPaths, role: str) -> dict[str, dict[str, object]]:
        table = tomllib.loads(self.announcement.config)
        if paths.model is not None:
            table["model"] = {"path": str(paths.model)}
        if self.announcement.needs_env_token and role == "rollout":
            token = os.environ.get(ENV_TOKEN_VARIABLE)
            if not token:
                raise UsageError(f"the environment server of the run requires a token: set {ENV_TOKEN_VARIABLE}")
            table["env"]["token"] = token
        return table


def find_run(address: str, *, run: str | None, token_file: Path | None) -> AnnouncedRun:
    """The run at `http://HOST:PORT/v1/runs/RUN`, or the only running one of the ledger at `http://HOST:PORT`."""
    base, named = split_address(address)
    chosen = run or named
    token = os.environ.get(TOKEN_VARIABLE) if token_file is None else read_token(token_file)
    try:
        if chosen is None:
            chosen = _only_run(base, token)
        with open_sync_ledger_client(base, chosen, request_s=CONNECT_S, token=token) as ledger:
            found = ledger.wait(ledger.client.announcement())
    except TransientError as error:
        raise UsageError(f"no ledger responds at {base}: {error}") from error
    except (NotFoundError, UsageError) as error:
        raise UsageError(str(error)) from error
    except RunError as error:
        raise UsageError(
            f"{error}. The token is that of the run (the file `token` of its directory) or, with ledger.url, of the ledger "
            f"service: name its file with --token-file, or set {TOKEN_VARIABLE}"
        ) from error
    if found.version != __version__:
        raise UsageError(
            f"run {chosen} uses Rollbook {found.version}, and this machine has {__version__}: install the same"
        )
    return AnnouncedRun(str(chosen), found, token)


def _only_run(base: str, token: str | None) -> str:
    with open_sync_ledger_client(base, "", request_s=CONNECT_S, token=token) as ledger:
        runs = ledger.wait(ledger.client.announced())
        if len(runs) == 1:
            return runs[0]
        if runs:
            raise UsageError(f"--run is required: the ledger at {base} has {len(runs)} runs ({', '.join(runs)})")
        known = ", ".join(ledger.runs()) or "none"
    raise UsageError(
        f"no run of the ledger at {base} can be joined (its runs: {known}): start one with cluster.allow_join = true"
    )


def _require_files(config: RunConfig, role: str, paths: LocalPaths) -> None:
    sections = {name: getattr(config, name) for name in FILES_OF_ROLE[role]}
    if role == "rollout" and config.env.pool_size is not None:
        del sections["env"]
    faults = [f"{path}: {text}" for path, text in missing_files(sections, paths.source_dir, [paths.source_dir])]
    if role != "env":
        model_faults = load_on_demand("rollbook.run.preflight.model_files:model_faults")
        faults += [f"model.path: {text}" for text in model_faults(config.model, paths.source_dir)]
    if faults:
        listed = "\n".join(f"  {fault}" for fault in faults)
        raise UsageError(
            f"this machine lacks files that the role {role} needs. They are looked up in {paths.source_dir} (--source; --model for "
            f"the model). Objects that were passed to rollbook.train are in the run directory only: join with that.\n{listed}"
        )


class AnnouncementWatch:
    """Whether a run that was joined by address is still running, with the same addresses."""

    def __init__(self, announcement: Announcement, *, is_own_ledger: bool, silent_s: float) -> None:
        """`is_own_ledger`: the ledger is a process of the run. `silent_s`: one that does not respond for this long has stopped."""
        self._addresses = announcement.addresses
        self._is_own_ledger = is_own_ledger
        self._silent_s = silent_s
        self._seen = time.monotonic()

    async def is_running(self, ledger: LedgerClient) -> bool:
        missing_s = time.monotonic() - self._seen
        # The supervisor keeps the socket open while it restarts its ledger: a refused connection shows that both have ended.
        if self._is_own_ledger and await _is_refused(self._addresses["ledger"]):
            return missing_s < REFUSED_S
        try:
            async with asyncio.timeout(CONNECT_S):
                found = await ledger.announcement()
        except NotFoundError:
            return missing_s < GONE_S
        except (TransientError, TimeoutError):
            return missing_s < self._silent_s
        self._seen = time.monotonic()
        return found.addresses == self._addresses


async def _is_refused(url: str) -> bool:
    parts = urlsplit(url)
    try:
        async with asyncio.timeout(CONNECT_S):
            _, writer = await asyncio.open_connection(parts.hostname, parts.port)
    except ConnectionRefusedError:
        return True
    except (OSError, TimeoutError):
        return False
    writer.close()
    return False


def announcement_of(config: RunConfig, directory: RunDirectory, addresses: Mapping[str, str]) -> Announcement:
    """The model directory must exist."""
    public = config.model_copy(
        update={
            # A member needs no other setting of the ledger, and the URL of the store may contain a password.
            "ledger": RunLedgerConfig(url=config.ledger.url, request_s=config.ledger.request_s),
            "env": config.env.model_copy(update={"token": None}),
        }
    )
    files = (directory.token_file, directory.client_token_file)
    return Announcement(
        directory_id=directory.id,
        version=__version__,
        config=dump_toml(public),
        addresses=dict(addresses),
        tokens={file.name: read_token(file) for file in files},
        tokenizer_digest=tokenizer_digest(directory.initial_model),
        needs_env_token=config.env.token is not None,
    )


def tokenizer_digest(model_dir: Path) -> str:
    """Empty if the model has no tokenizer."""
    try:
        return hashlib.sha256((model_dir / "tokenizer.json").read_bytes()).hexdigest()
    except FileNotFoundError:
        return ""


async def announce(
    loaded: LoadedConfig, directory: RunDirectory, addresses: Mapping[str, str], *, log: EventLog
) -> None:
    """Announce the run to every replica of the ledger's service.

    Waits:  a third of the time after which an announcement ends.
    Ends:   on cancellation.
    """
    announcement = announcement_of(loaded.config, directory, addresses)

    async def repeat(url: str) -> None:
        async with open_run_ledger(loaded, directory, url, log=log, is_trainer=True) as ledger:
            while True:
                with suppress(RollbookError):
                    await ledger.announce(announcement)
                await asyncio.sleep(LEASE_S / BEATS_PER_LEASE)

    async with asyncio.TaskGroup() as group:
        for url in addresses["ledger"].split(","):
            group.create_task(repeat(url), name=f"run.announce {url}")
