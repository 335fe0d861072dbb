"""Settings of a run on several machines."""

from pydantic import BaseModel


class ClusterConfig(BaseModel, frozen=True, extra="forbid"):
    """Machines that serve the run in addition to the one on which it was started."""

    allow_join: bool = False
    """Processes that are started with `rollbook join`, on this or on other machines, may serve the run. Clients then follow the
    list of members in the ledger."""

    host: str = "127.0.0.1"
    """Address on which the servers of this run listen. On any address but loopback every request needs a token of the run."""
