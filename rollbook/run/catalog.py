"""The runs that a dashboard shows: of a run directory, of a folder of them, or of a ledger service."""

import asyncio
import hashlib
import json
import os
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from pydantic import BaseModel

from rollbook.contracts.admission import RunId
from rollbook.contracts.batch import BatchEntry, BatchManifest, TrainingBatch
from rollbook.contracts.errors import NotFoundError, RollbookError, RunError, UsageError
from rollbook.contracts.group import PromptGroup
from rollbook.contracts.plugin import load_on_demand
from rollbook.contracts.trajectory import RolloutSample
from rollbook.dashboard.run_view import (
    Catalog,
    ConfigField,
    ConfigSection,
    MetricMeaning,
    OpenedRun,
    RunDetails,
    RunPlace,
    TokenReader,
)
from rollbook.dashboard.source import LedgerSource
from rollbook.ledger.client.blocking import split_address
from rollbook.ledger.client.client import open_ledger_client
from rollbook.ledger.stores.registry import sqlite_url
from rollbook.ledger.tools.explain import REASONS
from rollbook.rollout.chat.provenance import Pieces, spans_of
from rollbook.rollout.metrics import ROLLOUT_METRICS
from rollbook.run.actions import act_on_directory, act_on_ledger
from rollbook.run.config.field_docs import field_docs
from rollbook.run.config.run import LoadedConfig, RunConfig, dump_toml, load_resolved_config
from rollbook.run.directory import RunDirectory
from rollbook.run.reader import QUERY_S, HttpSource, StoreSource, last_audit, open_source
from rollbook.trainer.advantages.episodes import BATCH_NORMALISED
from rollbook.trainer.advantages.registry import credit
from rollbook.trainer.config import TrainerConfig
from rollbook.trainer.metrics import TRAINER_METRICS

DEPTH = 5
"""How deep below a folder runs are searched. `runs/STUDY/cells/CELL/seed-N` is a run of a study."""
MAX_RUNS = 1000
INDEX_FILE = "dashboard/index.sqlite"
MEANINGS = {
    metric.name: MetricMeaning(unit=metric.unit, meaning=metric.meaning)
    for metric in (*ROLLOUT_METRICS, *TRAINER_METRICS)
}
DROP_MEANINGS = {kind.value: meaning for kind, meaning in REASONS.items()}


def open_catalog(target: str, *, token: str | None = None) -> Catalog:
    """`target` is a run directory, a folder with run directories, or the address of a ledger. Raises `UsageError`."""
    if target.startswith(("http://", "https://")):
        return LedgerCatalog(target, token)
    path = Path(target).resolve()
    if not path.is_dir():
        raise UsageError(f"{path} is not a directory: name a run directory, a folder with runs, or the URL of a ledger")
    return DirectoryCatalog(path)


class DirectoryCatalog:
    """Satisfies `Catalog`. The folder is searched at each request, so that new runs appear."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @property
    def target(self) -> str:
        return str(self._folder)

    async def places(self) -> list[RunPlace]:
        found = await asyncio.to_thread(lambda: list(_run_places(self._folder)))
        return sorted(found, key=lambda place: place.created or 0.0, reverse=True)

    def open(self, place: RunPlace) -> AbstractAsyncContextManager[OpenedRun]:
        return _open_directory(place)


class LedgerCatalog:
    """Satisfies `Catalog`."""

    def __init__(self, url: str, token: str | None) -> None:
        self._base, self._run = split_address(url)
        self._token = token

    @property
    def target(self) -> str:
        return self._base

    async def places(self) -> list[RunPlace]:
        run_ids: Sequence[str] = [self._run] if self._run is not None else []
        if not run_ids:
            async with open_ledger_client(self._base, "", request_s=QUERY_S, token=self._token) as client:
                run_ids = await client.runs()
        return [
            RunPlace(key=run, name=run, source="ledger", path=f"{self._base}/v1/runs/{run}")
            for run in reversed(run_ids)
        ]

    @asynccontextmanager
    async def open(self, place: RunPlace) -> AsyncIterator[OpenedRun]:
        async with open_ledger_client(self._base, place.name, request_s=QUERY_S, token=self._token) as client:
            yield OpenedRun(
                details=RunDetails(key=place.key, name=place.name, source=place.source, path=place.path),
                ledger=HttpSource(client),
                act=partial(act_on_ledger, place.path),
                index_file=_cache_file(place.path),
                meanings=MEANINGS,
                drop_meanings=DROP_MEANINGS,
            )


def _cache_file(name: str) -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(cache) / "rollbook" / "dashboard" / f"{hashlib.sha256(name.encode()).hexdigest()[:32]}.sqlite"


def _run_places(folder: Path) -> Iterator[RunPlace]:
    if (folder / "run.json").is_file():
        yield _place(folder, folder.name)
        return
    count = 0
    for root, folders, files in os.walk(folder):
        path = Path(root)
        if "run.json" in files:
            yield _place(path, path.relative_to(folder).as_posix())
            count += 1
            folders.clear()
        elif len(path.relative_to(folder).parts) >= DEPTH:
            folders.clear()
        else:
            folders[:] = [name for name in folders if not name.startswith(".")]  # such as .venv and .git
        if count >= MAX_RUNS:
            return


def _place(path: Path, key: str) -> RunPlace:
    manifest = _manifest(path)
    created = manifest.get("created")
    return RunPlace(
        key=key,
        name=str(manifest.get("name") or path.name),
        source="directory",
        path=str(path),
        created=created if isinstance(created, int | float) else None,
    )


def _manifest(path: Path) -> dict[str, Any]:
    try:
        found = json.loads((path / "run.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


@asynccontextmanager
async def _open_directory(place: RunPlace) -> AsyncIterator[OpenedRun]:
    directory = RunDirectory(Path(place.path))
    recorded = await asyncio.to_thread(_recorded, directory)
    loaded, note = await asyncio.to_thread(_read_config, directory)
    config = None if loaded is None else loaded.config
    async with AsyncExitStack() as stack:
        yield OpenedRun(
            details=_details(place, config),
            ledger=await _open_ledger(directory, loaded, place.name, stack),
            act=partial(act_on_directory, directory),
            index_file=directory.path / INDEX_FILE,
            directory=directory.path,
            audited_at=lambda: None if (audit := last_audit(directory.audit_file)) is None else audit.at,
            is_running=directory.is_running,
            is_outdated=lambda: _recorded(directory) not in (None, recorded),
            config=lambda: ([], "") if config is None else config_view(config),
            tokens=lambda: _load_tokens(directory),
            advantages=lambda group: None if config is None else _advantages(group, config.trainer),
            meanings=MEANINGS,
            drop_meanings=DROP_MEANINGS,
            notes=() if note is None else (note,),
        )


def _recorded(directory: RunDirectory) -> tuple[Any, int] | None:
    """When the run was created, and its configuration written. None: it was deleted, and what was read of it is still shown."""
    try:
        return _manifest(directory.path).get("created"), directory.config_file.stat().st_mtime_ns
    except OSError:
        return None


async def _open_ledger(
    directory: RunDirectory, loaded: LoadedConfig | None, name: str, stack: AsyncExitStack
) -> LedgerSource:
    if loaded is None:
        return StoreSource(sqlite_url(directory.ledger), RunId(name), directory=directory)
    return await stack.enter_async_context(open_source(loaded, directory))


def _read_config(directory: RunDirectory) -> tuple[LoadedConfig | None, str | None]:
    """The configuration, or why this release cannot read it. The rest of the run is shown without it."""
    try:
        return load_resolved_config(directory), None
    except (RunError, OSError, ValueError, KeyError) as error:
        return None, f"The configuration of this run cannot be read: {error}"


def _details(place: RunPlace, config: RunConfig | None) -> RunDetails:
    if config is None:
        return RunDetails(key=place.key, name=place.name, source=place.source, path=place.path, created=place.created)
    return RunDetails(
        key=place.key,
        name=config.run.name,
        source=place.source,
        path=place.path,
        created=place.created,
        total_steps=config.trainer.max_steps,
        max_head_offpolicy_versions=config.gate.max_head_offpolicy_versions,
        batch_policy=str(config.gate.batch_policy),
        groups_per_step=config.gate.groups_per_step,
        max_in_flight=config.gate.max_groups_in_flight,
        has_evaluation=config.evaluation.every_steps is not None,
        unconfined=config.unconfined,
    )


def config_view(config: RunConfig) -> tuple[list[ConfigSection], str]:
    """The sections in the order of the file, with defaults and meanings, and the whole as TOML. Secrets are masked."""
    sections = []
    for name in RunConfig.model_fields:
        model = getattr(config, name)
        if isinstance(model, BaseModel):
            sections.append(ConfigSection(name=name, fields=_config_fields(model, name)))
    return sections, dump_toml(config, masks_secrets=True)


def _config_fields(model: BaseModel, path: str) -> list[ConfigField]:
    meanings = field_docs(type(model))
    values = model.model_dump(mode="json")
    found: list[ConfigField] = []
    for name, field in type(model).model_fields.items():
        value = getattr(model, name)
        if isinstance(value, BaseModel):
            found += _config_fields(value, f"{path}.{name}")
            continue
        default: Any = None
        if not field.is_required():
            default = field.get_default(call_default_factory=True, validated_data={})
        found.append(
            ConfigField(
                path=f"{path}.{name}",
                value=values[name],
                default=_plain(default),
                is_default=not field.is_required() and value == default,
                meaning=meanings.get(name, ""),
            )
        )
    return found


def _plain(value: Any) -> Any:
    """A default as a JSON value."""
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if value is None or isinstance(value, str | int | float | bool | list | dict | tuple):
        return value
    return str(value)


def _advantages(group: PromptGroup, config: TrainerConfig) -> list[float] | None:
    # Those of a part, too, depend on the other samples of its batch.
    # A page runs no code of users.
    recipe = config.recipe
    if recipe.has_own_advantage or recipe.advantage in BATCH_NORMALISED or group.baseline is not None:
        return None
    entry = BatchEntry(group_id=group.id, sequence=0, payload_digest="", oldest_version=None)
    batch = TrainingBatch(manifest=BatchManifest(step=1, entries=(entry,), digest=""), groups=(group,))
    try:
        found: list[float] = credit(batch, config).by_sample.tolist()
    except RunError:  # the estimator needs what this group does not have
        return None
    return found


class _Tokenizer(Pieces, Protocol):
    pass


@dataclass(frozen=True, slots=True)
class ModelTokens:
    """Satisfies `TokenReader`."""

    tokenizer: _Tokenizer

    def texts(self, token_ids: Sequence[int]) -> list[str]:
        text, offsets = self.tokenizer.pieces(token_ids)
        return [text[start:end] for start, end in offsets]

    def authors(self, sample: RolloutSample, sequence: int) -> list[tuple[int, int, str]]:
        turns = [turn for turn in sample.turns if turn.sequence == sequence]
        spans = spans_of(sample.sequences[sequence], turns, sample.messages, self.tokenizer)
        return [(span.start, span.end, span.author) for span in spans]


def _load_tokens(directory: RunDirectory) -> TokenReader | None:
    """The tokenizer of the initial model; None if the model is elsewhere, or `tokenizers` is not installed."""
    try:
        tokenizer = load_on_demand("rollbook.rollout.chat.tokenizer:ModelTokenizer")
        return ModelTokens(tokenizer.from_directory(directory.initial_model))
    except (RollbookError, ImportError, OSError, ValueError, KeyError, NotFoundError):
        return None
