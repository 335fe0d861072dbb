"""The protocols between the rooms, in the order of a trajectory. The second file to read, after the README.

Rooms never import each other; they receive other rooms' objects as arguments typed by these protocols. Implementations raise the
errors of `contracts/errors.py`: `TransientError` after their bounded retries, `RunError` where the operator must act.
"""

from collections.abc import Awaitable, Collection, Mapping, Sequence
from typing import Any, Protocol

from rollbook.contracts.admission import DrawProgress, LedgerStatus, OpenReply, OwnerId, PartReceipt, PastDraw, Receipt
from rollbook.contracts.batch import AckReceipt, EncodedBatch, EndOfRun, PassSplit, TrainerRole
from rollbook.contracts.group import DropReason, GroupId, GroupOutcome
from rollbook.contracts.group_codec import EncodedGroup
from rollbook.contracts.policy import Completion, OnTokens, Publication, SamplerExactness, SamplingParams
from rollbook.contracts.task import Draw, Observation, Task, TaskId
from rollbook.contracts.weights import Adapter


class TaskSource(Protocol):
    """Proposes the next draws. Called by the dispatcher, implemented by `tasks`."""

    def rebuild(self, progress: DrawProgress) -> None:
        """Restore the position from the ledger. Called once, before the first `propose`."""

    def catch_up(self, progress: DrawProgress) -> None:
        """Other dispatchers are ahead: propose the draws that follow theirs."""

    @property
    def needs_history(self) -> bool:
        """Whether `recall` must be called with all draws."""

    def recall(self, past: Sequence[PastDraw]) -> None:
        """Draws that this dispatcher does not play, only if `needs_history`: after `rebuild` all past ones, in order of admission,
        page by page; later those of other dispatchers, when they are opened and once more when they are settled."""

    def propose(self, count: int) -> Sequence[Draw]:
        """Up to `count` next draws. Returns the same ones until `taken` is called. Empty: exhausted."""

    def taken(self, count: int) -> None:
        """The first `count` proposed draws were opened in the ledger."""

    def task(self, task_id: TaskId) -> Task:
        """The task of a grant, which an earlier process may have drawn. Raises `RunError` if the dataset no longer contains it."""

    def observe(self, group_id: GroupId, position: int, outcome: GroupOutcome | None) -> None:
        """A draw was settled."""

    @property
    def is_exhausted(self) -> bool:
        """Whether all draws were taken."""


class Environment(Protocol):
    """What an agent acts in, for one episode. The methods of your own environment may be plain or async."""

    async def reset(self, task: Mapping[str, Any]) -> Observation: ...

    async def step(self, action: str) -> Observation: ...

    async def close(self) -> None: ...


class Policy(Protocol):
    """Samples completions. Called by episodes, implemented by `inference.client`."""

    async def complete(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        min_publication: int = 0,
        timeout_s: float | None = None,
        on_tokens: OnTokens | None = None,
    ) -> Completion:
        """Sample one completion with weights at least as new as `min_publication`.

        `on_tokens` receives tokens as they are sampled, if the server can send them. If the connection is lost after that, the
        completion ends with the tokens so far, as aborted.
        """


class GroupSink(Protocol):
    """Grants groups and stores them. Called by the dispatcher, implemented by `ledger.client`."""

    async def join(self, owner_name: str) -> OwnerId:
        """Register a dispatcher. It replaces an earlier owner of the same name, whose groups get another attempt."""

    async def open(self, owner: OwnerId, draws: Sequence[Draw], *, limit: int, wait_s: float = 0.0) -> OpenReply:
        """Request up to `limit` groups to play. One transaction, which also checks the capacity of the gate.

        Counts as a heartbeat. With `wait_s` the ledger responds as soon as it can grant a group.
        """

    async def heartbeat(self, owner: OwnerId) -> None: ...

    async def submit(self, group: EncodedGroup) -> PartReceipt:
        """Store a group, or a part of one; with `drop`, as dropped. Idempotent by id.

        With batch policy `parts`, the next part is opened in the same transaction, for the samples that the group still lacks.
        Parts of a group are submitted in order. Raises `UnusableGroupError` for a group that the run could not train, and for a
        part with too many samples or another baseline. Nothing is stored then.
        """

    async def close(self, group_id: GroupId, reason: DropReason, *, outcome: GroupOutcome | None = None) -> Receipt:
        """Settle a group that will not be submitted."""

    async def release(self, group_id: GroupId, *, attempt: int, cause: str) -> None:
        """Return a group for another attempt (its worker died). After the last attempt the ledger drops it."""

    async def payload(self, group_id: GroupId) -> bytes:
        """The stored frame of a group or part. Raises `NotFoundError` if it has none, or none any more."""

    async def exhausted(self) -> None:
        """There are no more draws, and all of them were opened."""

    async def progress(self) -> DrawProgress: ...

    async def outcomes(self, *, after: int, limit: int) -> Sequence[PastDraw]:
        """At most `limit` draws with an admission sequence above `after`, in order. Start with -1; an empty result is the end."""

    async def status(self) -> LedgerStatus: ...


class BatchSource(Protocol):
    """Provides batches. Called by the trainer, implemented by `ledger.client`. All calls after `take_role` are fenced."""

    async def take_role(self, *, restored_step: int) -> TrainerRole:
        """Become the trainer, with a higher epoch than all before. `restored_step` is the step of its checkpoint."""

    async def encoded_batch(self, step: int, *, wait_s: float) -> EncodedBatch | EndOfRun | None:
        """The batch of `step`, which never changes. None: not enough groups yet; call again."""

    async def acknowledge(
        self,
        step: int,
        weights_digest: str,
        *,
        unusable: Mapping[GroupId, str] | None = None,
        split: PassSplit | None = None,
    ) -> AckReceipt:
        """Batch `step` was trained with this split, without the groups in `unusable` (with the reason). Called in order;
        idempotent."""

    async def register(self, step: int, weights_digest: str) -> Publication:
        """Get a publication id for weights that will be pushed."""

    async def confirm(self, publication: Publication) -> None:
        """All replicas in service have loaded it."""

    async def status(self) -> LedgerStatus:
        """Its `checkpoint_requested` is a request of an operator."""

    async def checkpointed(self, step: int, *, oldest_kept: int) -> None:
        """The checkpoint of `step` is durable; `oldest_kept` is the oldest that can still be restored."""

    async def finish(self, reason: EndOfRun) -> None:
        """End the run: open groups are dropped as end_of_run, and the gate stays closed."""


class WeightStage(Protocol):
    """Stages weights for replicas to load. Called by the trainer's publisher, implemented by `inference.weights`."""

    @property
    def takes_gpu_weights(self) -> bool:
        """Whether weights in GPU memory are sent from there. Otherwise the caller copies them to main memory first."""

    async def put(self, publication: Publication, weights: Mapping[str, Any], *, adapter: Adapter | None = None) -> str:
        """Stage a copy of the weights; returns the location for replicas.

        With `adapter`, `weights` are the tensors of that adapter.
        """

    async def keep_only(self, locations: Collection[str]) -> None:
        """Delete staged weights at all other locations."""


class Fence(Protocol):
    """Raises `FencedError` if a newer trainer has taken the role."""

    def __call__(self) -> Awaitable[None]: ...


class WeightReceiver(Protocol):
    """Loads weights into replicas. Called by the trainer's publisher, implemented by `inference.weights`."""

    async def receive(
        self, publication: Publication, location: str, *, within_s: float | None = None, fence: Fence | None = None
    ) -> None:
        """Load the weights at `location` into all replicas in service; returns when all report them.

        Retries while replicas are unreachable, for at most `within_s`; then raises `TransientError`. `fence` is called before each
        attempt on replicas that cannot reject an old epoch themselves.
        """

    async def reported(self) -> Sequence[Publication | None]:
        """The publication that each replica in service reports; None for one without published weights."""

    @property
    def exactness(self) -> SamplerExactness | None:
        """What the replicas in service last said of their logprobs; None: nothing yet."""
