"""Settings of the Atropos dialect."""

from typing import Literal

from pydantic import BaseModel, Field


class AtroposConfig(BaseModel, frozen=True, extra="forbid"):
    """One run is served at the root of the service; any other under `/atropos/RUN`."""

    run: str = "atropos"
    """The run at the root."""

    env_silence_s: float = Field(default=60.0, gt=0)
    """An environment that neither polls nor posts for this long no longer delays batches by its minimum allocation, until it
    polls or posts again."""

    hold_s: float = Field(default=20.0, ge=0)
    """Seconds that a post waits while the queue is full before it gets a 503. Atropos clients drop a group on a 4xx and after
    three 5xx, so waiting is better."""

    serve_s: float = Field(default=300.0, gt=0)
    """Maximum seconds that a client takes to read a batch. Then its connection is closed and the batch is served again."""

    retry_window_s: float = Field(default=600.0, gt=0)
    """Seconds within which a repeated post is recognised if its response could not be delivered, so that it is stored once."""

    keep_batches: int = Field(default=64, ge=1)
    """Number of served batches whose groups are kept, so that a trainer can return to an older step with `starting_step`."""

    register_again: Literal["keep", "reset"] = "keep"
    """What another `/register` does. `keep`: the new settings apply and no group is dropped. `reset`: all data is dropped first, as
    the documentation of the original says."""

    wait_for_batch: bool = False
    """An environment may register only after the first `/batch`, as in the code of the original. Otherwise after `/register`, as
    its documentation says."""

    body_s: float = Field(default=60.0, gt=0)
    """Maximum seconds to receive the body of a request."""
