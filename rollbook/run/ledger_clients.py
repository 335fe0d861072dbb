"""The ledger of a run: its store, the settings of the run in it, and clients of its service."""

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

from rollbook.access.guard import is_loopback
from rollbook.access.tokens import read_token
from rollbook.contracts.admission import MemberRole, RunSettings
from rollbook.contracts.batch import TrainerRole
from rollbook.contracts.group_checks import TrainingLimits
from rollbook.contracts.ports import BatchSource
from rollbook.ledger.client.client import LedgerClient, open_ledger_client
from rollbook.ledger.config import RunLedgerConfig
from rollbook.ledger.http.auth import OPEN_WITHOUT_TOKEN, Keys, Role
from rollbook.ledger.stores.registry import sqlite_url
from rollbook.run.config.run import LoadedConfig, RunConfig
from rollbook.run.directory import RunDirectory
from rollbook.telemetry.events import EventLog

POSITIONS = ("max_position_embeddings", "n_positions", "max_sequence_length", "model_max_length", "seq_length")
"""Names of the longest sequence in the `config.json` of models."""


def store_url(config: RunLedgerConfig, directory: RunDirectory) -> str:
    return sqlite_url(directory.ledger) if config.store is None else config.store.get_secret_value()


def run_settings(config: RunConfig, directory: RunDirectory) -> RunSettings:
    """The settings with which the run is created in the ledger. The model directory must exist."""
    return config.ledger_settings(
        limits=model_limits(
            directory.initial_model,
            needs_logprobs=config.trainer.missing_logprobs == "refuse",
            most=config.trainer.max_sequence_tokens,
        ),
        directory_id=directory.id,
    )


def model_limits(model_dir: Path, *, needs_logprobs: bool, most: int | None = None) -> TrainingLimits:
    """The limits of the model in a Hugging Face directory, or of the base model of an adapter directory. `most`: tokens of the
    longest sequence that the trainer has memory for, if it is known."""
    settings = _read_json(model_dir / "config.json")
    if not settings:
        base = _read_json(model_dir / "adapter_config.json").get("base_model_name_or_path")
        settings = _read_json(Path(base) / "config.json") if base else {}
    settings = settings.get("text_config") or settings
    lengths = [settings[name] for name in POSITIONS if settings.get(name)]
    return TrainingLimits(
        vocabulary_size=settings.get("vocab_size"),
        max_tokens=min([*lengths[:1], *([] if most is None else [most])], default=None),
        needs_logprobs=needs_logprobs,
    )


def _read_json(path: Path) -> dict[str, Any]:
    """An empty dict if there is no such file: a model on the hub is checked by the trainer alone."""
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return found
    except FileNotFoundError:
        return {}


def ledger_token_file(loaded: LoadedConfig, directory: RunDirectory | None = None) -> Path | None:
    """The file with the token of the trainer's requests: that of the run for its own ledger. An external ledger may need none."""
    config = loaded.config.ledger
    if config.token_file is not None:
        return loaded.source_dir / config.token_file.expanduser()
    return None if config.url is not None or directory is None else directory.token_file


def external_token(loaded: LoadedConfig) -> str | None:
    """The token of the ledger at `ledger.url`."""
    file = ledger_token_file(loaded)
    return None if file is None else read_token(file)


def client_token(config: RunConfig, directory: RunDirectory) -> str | None:
    """The token for playing and reading at the run's own servers. On loopback these need none."""
    return None if is_loopback(config.cluster.host) else read_token(directory.client_token_file)


def ledger_keys(config: RunConfig, directory: RunDirectory) -> Keys:
    """The tokens that the run's own ledger accepts."""
    steering, playing = read_token(directory.token_file), read_token(directory.client_token_file)
    return Keys(
        {Role.TRAINER: [steering], Role.PRODUCER: [steering, playing], Role.VIEWER: [steering, playing]},
        open_roles=OPEN_WITHOUT_TOKEN if is_loopback(config.cluster.host) else frozenset(),
    )


def open_run_ledger(
    loaded: LoadedConfig, directory: RunDirectory, address: str, *, log: EventLog, is_trainer: bool = False
) -> AbstractAsyncContextManager[LedgerClient]:
    """A client of the run's ledger."""
    config = loaded.config
    token = ledger_token(loaded, directory, is_trainer=is_trainer)
    return open_ledger_client(address, config.run.name, request_s=config.ledger.request_s, log=log, token=token)


def ledger_token(loaded: LoadedConfig, directory: RunDirectory, *, is_trainer: bool) -> str | None:
    """The token of a trainer opens more requests of the run's own ledger."""
    if loaded.config.ledger.url is not None:
        return external_token(loaded)
    return read_token(directory.token_file if is_trainer else directory.client_token_file)


@asynccontextmanager
async def open_trainer_batches(
    url: str, run_id: str, role: TrainerRole, *, request_s: float, token: str | None
) -> AsyncIterator[BatchSource]:
    """A client that reads batches with the role that another process of the trainer has taken."""
    async with open_ledger_client(url, run_id, request_s=request_s, token=token) as client:
        client.use_role(role)
        yield client


def member_source(
    ledger: LedgerClient, role: MemberRole, own: Sequence[str], *, in_service_only: bool = True
) -> Callable[[], Awaitable[list[str]]]:
    """Lists the servers of a role now: those that the run started, and those that joined.

    The trainer pushes weights to all policy servers; requests go to those in service.
    """

    async def urls() -> list[str]:
        members = [member for member in await ledger.members() if member.role is role]
        joined = [member.address for member in members if member.in_service or not in_service_only]
        return list(dict.fromkeys([*own, *joined]))

    return urls
