"""One run as the dashboard sees it: its ledger, its files and its index.

`run` composes these values: it knows configurations, ledgers and tokenizers, which this room does not import.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import msgspec

from rollbook.contracts.admission import Action, ActionKind, AuditReport
from rollbook.contracts.group import PromptGroup
from rollbook.contracts.trajectory import RolloutSample
from rollbook.dashboard.index.follower import FollowedIndex, follow
from rollbook.dashboard.run_files import RunReader, read_tiers
from rollbook.dashboard.run_metrics import RunMetrics
from rollbook.dashboard.series import MetricSeries
from rollbook.dashboard.source import LedgerSource

PUBLICATIONS_PAGE = 1000


class ConfigField(msgspec.Struct, frozen=True, kw_only=True):
    path: str
    value: Any
    default: Any
    is_default: bool
    meaning: str = ""


class ConfigSection(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    fields: list[ConfigField]


class MetricMeaning(msgspec.Struct, frozen=True, kw_only=True):
    unit: str
    meaning: str


class TokenReader(Protocol):
    """The text of tokens, and who wrote them."""

    def texts(self, token_ids: Sequence[int]) -> list[str]: ...

    def authors(self, sample: RolloutSample, sequence: int) -> list[tuple[int, int, str]]:
        """Start, end (exclusive) and author of each stretch of tokens."""


class OperatorAct(Protocol):
    """Raises `RollbookError` if the action is refused or the ledger cannot be reached; the message says why."""

    async def __call__(
        self, kind: ActionKind, *, author: str, target: str = "", sample: int | None = None, note: str = ""
    ) -> Action: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDetails:
    """What is fixed for a run. None: unknown, for a ledger without a run directory."""

    key: str
    name: str
    source: str
    """`directory` or `ledger`."""
    path: str
    created: float | None = None
    total_steps: int | None = None
    max_head_offpolicy_versions: int | None = None
    batch_policy: str | None = None
    groups_per_step: int | None = None
    max_in_flight: int | None = None
    has_evaluation: bool = False
    unconfined: Sequence[str] = ()
    """The settings with which code of the policy runs without a sandbox."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedRun:
    """A run that is open for reading."""

    details: RunDetails
    ledger: LedgerSource
    index_file: Path
    directory: Path | None = None
    act: OperatorAct | None = None
    """Acts on the run, in its ledger."""
    audited_at: Callable[[], float | None] = lambda: None
    """When the run's processes or a command last audited it without a violation."""
    is_running: Callable[[], bool] = lambda: False
    """Whether a live process trains the run."""
    is_outdated: Callable[[], bool] = lambda: False
    """Whether the run was resumed since, or another one was created in its place."""
    config: Callable[[], tuple[list[ConfigSection], str]] = lambda: ([], "")
    """The settings by section, and the TOML file."""
    tokens: Callable[[], TokenReader | None] = lambda: None
    """Loads the tokenizer of the run; None if there is none."""
    advantages: Callable[[PromptGroup], list[float] | None] = lambda group: None
    """The advantage of each sample; None if it depends on the rest of the batch."""
    meanings: Mapping[str, MetricMeaning] = field(default_factory=dict)
    """What each metric means."""
    drop_meanings: Mapping[str, str] = field(default_factory=dict)
    """Why groups of each kind were dropped."""
    notes: tuple[str, ...] = ()
    """What could not be read, in words."""


class RunPlace(msgspec.Struct, frozen=True, kw_only=True):
    """A run that can be opened."""

    key: str
    name: str
    source: str
    path: str
    created: float | None = None


class Catalog(Protocol):
    """The runs of the address or folder that the dashboard was started with."""

    @property
    def target(self) -> str: ...

    async def places(self) -> list[RunPlace]:
        """All runs, newest first."""

    def open(self, place: RunPlace) -> AbstractAsyncContextManager[OpenedRun]:
        """Raises `RollbookError` if the run cannot be read; the message says why."""


class RunView:
    """An opened run with what was read of its files so far. Files are read in a thread, one reader at a time.

    The index is opened when it is first needed, and closed with `stack`.
    """

    def __init__(self, run: OpenedRun, stack: AsyncExitStack) -> None:
        self.run = run
        self.details = run.details
        self.ledger = run.ledger
        self.directory = run.directory
        self._stack = stack
        self._index: FollowedIndex | None = None
        self.audit: tuple[float, float, AuditReport] | None = None
        """When the last audit ended, its seconds, and its result."""
        self.is_auditing = False
        self._reading = asyncio.Lock()
        self._series = None if run.directory is None else MetricSeries(run.directory)
        self._reader = None if run.directory is None else RunReader(run.directory)
        self._tokens: TokenReader | None = None
        self._has_loaded_tokens = False
        self._versions: dict[int, int] = {}
        self.tiers: dict[str, str] = {}
        self.task_texts: dict[str, str] = {}
        """What each task asks, as far as it was read."""

    async def index(self) -> FollowedIndex:
        async with self._reading:
            if self._index is None:
                opening = follow(self.run.index_file, self.details.name, self.ledger)
                self._index = await self._stack.enter_async_context(opening)
            if self.directory is not None and not self.tiers:
                # Written once, when the run starts.
                self.tiers = await asyncio.to_thread(read_tiers, self.directory)
                if tiers := self.tiers:
                    await self._index.read(lambda index: index.set_tiers(tiers))
            return self._index

    async def metrics(self) -> RunMetrics:
        reader = self._reader
        if reader is None:
            return RunMetrics()
        async with self._reading:
            return await asyncio.to_thread(reader.poll)

    async def series(self) -> MetricSeries | None:
        """All metrics, up to date. None without a run directory."""
        series = self._series
        if series is not None:
            async with self._reading:
                await asyncio.to_thread(series.poll)
        return series

    async def version_of(self, publications: Iterable[int]) -> dict[int, int]:
        """The step of each of these publications, as far as it is known."""
        wanted = {publication for publication in publications if publication >= 0}
        while wanted - self._versions.keys():
            start = max(self._versions, default=-1) + 1
            found = await self.ledger.publications(start=start, limit=PUBLICATIONS_PAGE)
            self._versions.update((int(publication.id), publication.step) for publication in found)
            if len(found) < PUBLICATIONS_PAGE:
                break
        return {publication: self._versions[publication] for publication in wanted & self._versions.keys()}

    async def tokens(self) -> TokenReader | None:
        if not self._has_loaded_tokens:
            self._tokens = await asyncio.to_thread(self.run.tokens)
            self._has_loaded_tokens = True
        return self._tokens
