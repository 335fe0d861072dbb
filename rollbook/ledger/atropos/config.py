"""What an operator may set about the Atropos dialect."""

from pydantic import BaseModel, Field


class AtroposConfig(BaseModel, frozen=True, extra="forbid"):
    """One run is served at the root of the service; any other under `/atropos/RUN`."""

    run: str = "atropos"
    """The run at the root."""

    env_silence_s: float = Field(default=60.0, gt=0)
    """An environment that neither polls nor posts for this long no longer holds back batches by its minimum allocation.
    It counts again as soon as it is heard."""

    hold_s: float = Field(default=20.0, ge=0)
    """Seconds that a post waits for room in a full queue before it is answered 503. Atropos clients drop a group on a 4xx and
    after three 5xx, so it is better to wait."""

    serve_s: float = Field(default=300.0, gt=0)
    """Seconds that one client may take to read a batch. Then its connection is cut and the batch is served again."""

    retry_window_s: float = Field(default=600.0, gt=0)
    """How long a post whose answer could not be delivered is remembered, so that its repetition is not stored again."""

    keep_batches: int = Field(default=64, ge=1)
    """Served batches whose groups are kept, so that a trainer can go back to an older step with `starting_step`."""

    body_s: float = Field(default=60.0, gt=0)
    """Seconds that the body of a request may take to arrive."""
