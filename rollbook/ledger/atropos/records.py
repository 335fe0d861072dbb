"""Rows of the Atropos dialect."""

from rollbook.contracts.admission import RunId
from rollbook.contracts.group import GroupId
from rollbook.ledger.records import Record

NO_ENV = -1
"""The environment id of a group that names no environment."""


class AtroposRecord(Record, frozen=True, kw_only=True):
    """One run as Atropos clients see it. Their step is the ledger's step plus `shift`."""

    run_id: RunId
    registration: str | None = None
    """The trainer's registration as JSON; None until a trainer registers, and after a reset."""
    is_started: bool = False
    """Whether a batch was requested; environments may register then."""
    first_step: int = 0
    """Batches of the ledger up to this one are from before the last reset."""
    handed_step: int = 0
    """The last batch that was sent, whether or not its body arrived."""
    served_step: int = 0
    """The last batch whose body was sent completely."""
    shift: int = 0
    reset_below: int = 0
    """A reset drops groups with a lower sequence."""
    latest: GroupId | None = None
    server: str | None = None
    """The front end that is sending a batch, so that no other one sends it too."""
    serving_until: float = 0.0
    """Wall time. A front end that stopped sending without a word loses the batch then."""

    @property
    def current_step(self) -> int:
        return self.handed_step + self.shift


class EnvRecord(Record, frozen=True, kw_only=True):
    run_id: RunId
    env_id: int
    desired_name: str
    real_name: str
    max_token_length: int
    weight: float
    group_size: int
    min_batch_allocation: float | None
    is_connected: bool
    last_seen: float


class QueuedGroup(Record, frozen=True, kw_only=True):
    """The fields of a queued group that batch forming needs. `place` is its order in the queue."""

    run_id: RunId
    group_id: GroupId
    place: int
    env_id: int
    size: int
    """Number of sequences."""
    is_buffered: bool = False
    """Its size differs from its environment's group size; it waits until some buffered groups add up to that size."""


class Bucket(Record, frozen=True, kw_only=True):
    """The number of queued groups of one environment and one size."""

    env_id: int
    size: int
    num: int


class UnconfirmedPost(Record, frozen=True, kw_only=True):
    """A stored post whose response may not have been received, and how often it was sent."""

    run_id: RunId
    digest: str
    num: int
    at: float
    answer: str
