"""The seams, in journey order. The second file to read, after the README.

Rooms never import each other: each takes what it needs as an argument typed by one of these. Implementations raise the errors of
`contracts/errors.py`: `TransientError` after their own bounded retries are spent, `RunError` where a person must act.
"""

from collections.abc import Awaitable, Collection, Mapping, Sequence
from typing import Any, Protocol

from rollbook.contracts.adapter import Adapter
from rollbook.contracts.admission import DrawProgress, LedgerStatus, OpenReply, OwnerId, PastDraw, Receipt
from rollbook.contracts.batch import AckReceipt, EndOfRun, TrainerRole, TrainingBatch
from rollbook.contracts.environment import Observation
from rollbook.contracts.group import DropReason, GroupId, GroupOutcome
from rollbook.contracts.group_codec import EncodedGroup
from rollbook.contracts.policy import Completion, Publication, SamplingParams
from rollbook.contracts.task import Draw, Task, TaskId


class TaskSource(Protocol):
    """What to do next. Called by the dispatcher, satisfied by `tasks`."""

    def rebuild(self, progress: DrawProgress) -> None:
        """Take up where the ledger stands. Called once, before the first `propose`."""

    @property
    def needs_history(self) -> bool:
        """Whether past draws matter one by one, and not only how far they got."""

    def recall(self, past: Sequence[PastDraw]) -> None:
        """Past draws in order of admission, page by page: after `rebuild`, and only where `needs_history`."""

    def propose(self, count: int) -> Sequence[Draw]:
        """Up to `count` draws that come next. Proposing again before `taken` gives the same ones. Empty: exhausted."""

    def taken(self, count: int) -> None:
        """The first `count` proposed draws are opened in the ledger."""

    def task(self, task_id: TaskId) -> Task:
        """The task of a grant, also one that an earlier process drew. Raises `RunError` when the dataset lost it."""

    def observe(self, group_id: GroupId, position: int, outcome: GroupOutcome | None) -> None:
        """A draw is settled."""

    @property
    def is_exhausted(self) -> bool:
        """Every draw there is was taken."""


class Environment(Protocol):
    """One world for one episode. Called by rollout functions, satisfied by `envs`."""

    async def reset(self, task: Mapping[str, Any]) -> Observation: ...

    async def step(self, action: str) -> Observation: ...

    async def close(self) -> None: ...


class Policy(Protocol):
    """Who answers. Called by episodes, satisfied by `inference.client`."""

    async def complete(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        min_publication: int = 0,
        timeout_s: float | None = None,
    ) -> Completion:
        """Sample one completion from weights at least as new as `min_publication`."""


class GroupSink(Protocol):
    """Where groups go. Called by the dispatcher, satisfied by `ledger.client`."""

    async def join(self, owner_name: str) -> OwnerId:
        """Become a dispatcher. The same name again supersedes the older owner: its groups get another attempt."""

    async def open(self, owner: OwnerId, draws: Sequence[Draw], *, limit: int, wait_s: float = 0.0) -> OpenReply:
        """Ask for up to `limit` groups to play. One transaction; the gate's capacity is checked inside.

        Also the owner's heartbeat. With `wait_s` the ledger answers as soon as there is something to grant.
        """

    async def heartbeat(self, owner: OwnerId) -> None: ...

    async def submit(
        self, group: EncodedGroup, outcome: GroupOutcome, *, attempt: int, drop: DropReason | None = None
    ) -> Receipt:
        """Store a finished group. Idempotent by group id. With `drop` it is kept as dropped, with its outcome (filters)."""

    async def close(self, group_id: GroupId, reason: DropReason, *, outcome: GroupOutcome | None = None) -> Receipt:
        """Settle a group that will not be submitted."""

    async def release(self, group_id: GroupId, *, attempt: int, cause: str) -> None:
        """Give a group back for another attempt (its worker died). After the last attempt the ledger drops it."""

    async def exhausted(self) -> None:
        """The source has no further draw, and all were opened."""

    async def progress(self) -> DrawProgress: ...

    async def outcomes(self, *, after: int, limit: int) -> Sequence[PastDraw]:
        """Draws whose admission sequence is above `after`, in its order, at most `limit`. -1 begins; an empty answer ends."""

    async def status(self) -> LedgerStatus: ...


class BatchSource(Protocol):
    """Where batches come from. Called by the trainer, satisfied by `ledger.client`. Every call after `take_role` is fenced."""

    async def take_role(self, *, restored_step: int) -> TrainerRole:
        """Become the trainer, with a higher epoch than any before. `restored_step`: the checkpoint it starts from."""

    async def batch(self, step: int, *, wait_s: float) -> TrainingBatch | EndOfRun | None:
        """The batch of `step`: the same forever. None: not enough groups yet (ask again)."""

    async def acknowledge(self, step: int, weights_digest: str) -> AckReceipt:
        """Batch `step` was trained. In order, idempotent."""

    async def register(self, step: int, weights_digest: str) -> Publication:
        """Get an id for weights about to be pushed."""

    async def confirm(self, publication: Publication) -> None:
        """Every replica in service has it."""

    async def checkpointed(self, step: int, *, oldest_kept: int) -> None:
        """The checkpoint of `step` is durable; `oldest_kept` is the oldest one that could still be restored."""

    async def finish(self, reason: EndOfRun) -> None:
        """The run is over: what is open is dropped as end_of_run, and the gate stays closed."""


class WeightStage(Protocol):
    """Where weights wait for replicas to take them. Called by the trainer's publisher, satisfied by `inference.weights`."""

    async def put(self, publication: Publication, weights: Mapping[str, Any], *, adapter: Adapter | None = None) -> str:
        """Keep them; gives the location to tell replicas. The tensors may change afterwards.

        With `adapter` they are its tensors, which stand beside the base that every replica has.
        """

    async def keep_only(self, locations: Collection[str]) -> None:
        """What lies elsewhere is no longer needed."""


class Fence(Protocol):
    """Raises `FencedError` where a newer trainer has taken over."""

    def __call__(self) -> Awaitable[None]: ...


class WeightReceiver(Protocol):
    """Where weights go. Called by the trainer's publisher, satisfied by `inference.weights`."""

    async def receive(
        self, publication: Publication, location: str, *, within_s: float | None = None, fence: Fence | None = None
    ) -> None:
        """Load the weights that lie at `location` into every replica in service; returns when all report them.

        Tried again while replicas are away, for at most `within_s`; then `TransientError` is raised. `fence` is asked before each
        try at replicas that cannot refuse an old epoch by themselves.
        """

    async def reported(self) -> Sequence[Publication | None]:
        """What each replica in service says it has; None for one that has no published weights."""
