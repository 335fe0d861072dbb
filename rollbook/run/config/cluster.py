"""Settings of a run on several machines."""

from pydantic import BaseModel, Field


class RayConfig(BaseModel, frozen=True, extra="forbid"):
    """A Ray cluster on which the additional processes are placed. `pip install 'rollbook[cluster]'` on every node."""

    address: str | None = None
    """`auto` starts Ray on this machine; otherwise the address of a cluster, such as `10.0.0.5:6379`. Also set by
    `rollbook train --cluster`. Unset: the processes are started on this machine, without Ray."""

    policy_cpus: float = Field(default=1.0, ge=0)
    """CPUs that Ray reserves for a policy server."""

    policy_gpus: float = Field(default=0.0, ge=0)
    """GPUs that Ray reserves for a policy server. It sees only those."""

    rollout_cpus: float = Field(default=1.0, ge=0)
    """CPUs that Ray reserves for a dispatcher and its workers."""

    def options(self, role: str) -> dict[str, float]:
        """What Ray reserves for a process."""
        if role == "policy":
            return {"num_cpus": self.policy_cpus, "num_gpus": self.policy_gpus}
        return {"num_cpus": self.rollout_cpus, "num_gpus": 0.0}


class ClusterConfig(BaseModel, frozen=True, extra="forbid"):
    """Machines that serve the run in addition to the one on which it was started."""

    allow_join: bool = False
    """More processes may serve the run while it is running: those of `rollbook join`, on this or on other machines, and of
    `rollbook scale`. Clients then follow the list of members in the ledger. Implied by the two settings below."""

    policy: int = Field(default=0, ge=0)
    """Policy servers in addition to `inference.replicas`. `rollbook scale` changes the number while the run is running."""

    rollout: int = Field(default=0, ge=0)
    """Dispatchers, each with its workers, in addition to the first one."""

    host: str = "127.0.0.1"
    """Address on which the servers of this run listen. On any address but loopback every request needs a token of the run."""

    ray: RayConfig = RayConfig()

    @property
    def has_members(self) -> bool:
        """Whether processes other than those of the plan may serve the run."""
        return self.allow_join or self.policy > 0 or self.rollout > 0 or self.ray.address is not None
