"""What an operator may set for all sandboxes of a run."""

from pydantic import BaseModel, Field


class SandboxConfig(BaseModel, frozen=True, extra="forbid"):
    """What the open sandboxes of a run may take together, on each machine: of agents, environments, verifiers and reward functions.
    One that does not fit waits."""

    at_once: int | None = Field(default=None, ge=1)
    """The most sandboxes that are open at the same time. For coding agents, four for each core if `gate.max_groups_in_flight` is
    not set either; else no limit."""

    memory_mb: int | None = Field(default=None, ge=64)
    """The most memory: the sum of `memory_mb` and `disk_mb` (files are in memory) of the open sandboxes, in steps of 64 MB. Unset:
    no limit."""

    processes: int | None = Field(default=None, ge=16)
    """The most processes and threads: the sum of the limits of the open sandboxes, in steps of 16. Unset: no limit."""

    wait_s: float = Field(default=600.0, gt=0)
    """The longest wait for room. After that the episode is unscorable and is played again."""

    @property
    def is_limited(self) -> bool:
        return not self.at_once is self.memory_mb is self.processes is None
