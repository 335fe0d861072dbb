"""Settings of a run on several machines or several GPUs."""

from typing import Literal, Self

from pydantic import BaseModel, Field, field_validator, model_validator


class RayConfig(BaseModel, frozen=True, extra="forbid"):
    """A Ray cluster on which the additional processes are placed. `pip install '.[cluster]'` on every node."""

    address: str | None = None
    """`auto` starts Ray on this machine; otherwise the address of a cluster, such as `10.0.0.5:6379`. Also set by
    `rollbook train --cluster`. Unset: the processes are started on this machine, without Ray."""

    policy_cpus: float = Field(default=1.0, ge=0)
    """CPUs that Ray reserves for a policy server."""

    policy_gpus: float = Field(default=0.0, ge=0)
    """GPUs that Ray reserves for a policy server. It sees only those."""

    rollout_cpus: float = Field(default=1.0, ge=0)
    """CPUs that Ray reserves for a dispatcher and its workers."""

    rank_cpus: float = Field(default=1.0, ge=0)
    """CPUs that Ray reserves for a trainer rank."""

    rank_gpus: float = Field(default=0.0, ge=0)
    """GPUs that Ray reserves for a trainer rank. It uses one."""

    env_cpus: float = Field(default=1.0, ge=0)
    """CPUs that Ray reserves for an environment server."""

    def options(self, role: str) -> dict[str, float]:
        """What Ray reserves for a process."""
        if role == "policy":
            return {"num_cpus": self.policy_cpus, "num_gpus": self.policy_gpus}
        if role == "rank":
            return {"num_cpus": self.rank_cpus, "num_gpus": self.rank_gpus}
        return {"num_cpus": self.env_cpus if role == "env" else self.rollout_cpus, "num_gpus": 0.0}


class AutoscaleConfig(BaseModel, frozen=True, extra="forbid"):
    """Changes the numbers of additional policy servers and dispatchers by one at a time, while the run is running. It grows what
    keeps the trainer waiting, and removes what is not needed."""

    max_policy: int = Field(default=0, ge=0)
    """Most additional policy servers. 0: their number is not changed."""

    min_policy: int = Field(default=0, ge=0)
    """Fewest additional policy servers."""

    max_rollout: int = Field(default=0, ge=0)
    """Most additional dispatchers. 0: their number is not changed."""

    min_rollout: int = Field(default=0, ge=0)
    """Fewest additional dispatchers."""

    interval_s: float = Field(default=5.0, gt=0)
    """Interval of observations."""

    hold_s: float = Field(default=60.0, gt=0)
    """How long the same finding must last before a number changes, and again before the next change."""

    starved_wait: float = Field(default=0.3, gt=0, le=1)
    """The trainer needs more if it waits for batches for more than this share of its time."""

    fed_wait: float = Field(default=0.05, ge=0, lt=1)
    """The trainer has enough if it waits for less than this share of its time while the gate is closed."""

    busy_requests: float = Field(default=32.0, gt=0)
    """A policy server with more requests than this is busy: another one is added, not a dispatcher."""

    @model_validator(mode="after")
    def _bounds_are_ordered(self) -> "AutoscaleConfig":
        for role in ("policy", "rollout"):
            least, most = getattr(self, f"min_{role}"), getattr(self, f"max_{role}")
            if least > most:
                raise ValueError(f"min_{role} = {least} is more than max_{role} = {most}")
        if self.fed_wait >= self.starved_wait:
            raise ValueError("fed_wait must be less than starved_wait; otherwise a number would alternate")
        return self

    @property
    def is_on(self) -> bool:
        return self.max_policy > 0 or self.max_rollout > 0


class ClusterConfig(BaseModel, frozen=True, extra="forbid"):
    """Machines that serve the run in addition to the one on which it was started."""

    allow_join: bool = False
    """More processes may serve the run while it is running: those of `rollbook join`, on this or on other machines, and of
    `rollbook scale`. Clients then follow the list of members in the ledger. Implied by the settings below."""

    policy: int = Field(default=0, ge=0)
    """Policy servers in addition to `inference.replicas`. `rollbook scale` changes the number while the run is running."""

    rollout: int = Field(default=0, ge=0)
    """Dispatchers, each with its workers, in addition to the first one."""

    env: int = Field(default=0, ge=0)
    """Environment servers in addition to the first one, each with `env.pool_size` environments."""

    ranks: int = Field(default=0, ge=0)
    """How many of the `trainer.ranks` run on other machines: placed by Ray, or joined with `rollbook join --role rank`. The trainer
    waits until all of them have joined. When one is lost, the trainer ends within seconds and resumes when it is back."""

    drain_s: float = Field(default=60.0, ge=0)
    """How long a process that is removed may take to finish its groups or requests. Then it is stopped; its unfinished groups get
    another attempt."""

    host: str = "127.0.0.1"
    """Address on which the servers of this run listen. On any address but loopback every request needs a token of the run."""

    autoscale: AutoscaleConfig = AutoscaleConfig()

    ray: RayConfig = RayConfig()

    @property
    def has_members(self) -> bool:
        """Whether processes other than those of the plan may serve the run."""
        is_scaled = self.policy + self.rollout + self.env + self.ranks > 0 or self.autoscale.is_on
        return self.allow_join or is_scaled or self.ray.address is not None


class GpuCounts(BaseModel, frozen=True, extra="forbid"):
    """How the GPUs of this machine are divided: `gpus = { trainer = 4, policy = 4 }`."""

    trainer: int = Field(ge=1)
    """GPUs of the trainer: one rank on each."""

    policy: int = Field(ge=1)
    """GPUs of the policy servers: one replica on each, or with vLLM as many for a replica as its weights need."""


class ResourcesConfig(BaseModel, frozen=True, extra="forbid"):
    """GPUs of the processes, by their numbers on this machine. Each process sees only its own (CUDA_VISIBLE_DEVICES). On a machine
    with several GPUs, and without a setting, they are divided so that a simulated run is fastest."""

    gpus: GpuCounts | None = None
    """The number of GPUs for the trainer and for the policy servers, instead of their numbers. Sets `trainer.ranks` and
    `inference.replicas` too."""

    policy_gpus: tuple[int, ...] = Field(default=())
    """GPUs of the policy servers, divided evenly among `inference.replicas` in this order. With vLLM, several for one replica mean
    tensor parallelism. Empty: every replica sees all GPUs and uses `inference.device`."""

    trainer_gpus: tuple[int, ...] = Field(default=())
    """GPUs of the trainer, one for each of `trainer.ranks`. Empty: the ranks use the first visible ones."""

    shared_base: bool = False
    """With LoRA: keep the frozen base in memory once. A process of its own loads it, and the trainer and all policy servers map it.
    They must compute in the same dtype, on one GPU or on the CPUs of a Linux machine, and publish adapters. On a GPU: true where it
    is possible and saves memory."""

    mps: bool | Literal["optional"] = False
    """Start an MPS server of NVIDIA for the run. Then the kernels of the trainer and of the policy servers run at the same time on
    the GPU that they share; otherwise they take turns. The server ends with the run. It needs `nvidia-cuda-mps-control`, a program
    of the driver. With `true`, a server that cannot be used ends the run; with `optional`, the run goes on without it. `auto` is
    `optional` where the trainer shares a GPU with embedded policy servers and no other MPS server is in use."""

    @field_validator("mps", mode="before")
    @classmethod
    def _check_mps(cls, value: object) -> object:
        if not isinstance(value, bool) and value != "optional":
            raise ValueError(f'Input should be true, false, "auto" or "optional", not {value!r}')
        return value

    @model_validator(mode="after")
    def _check_numbers(self) -> Self:
        for name in ("policy_gpus", "trainer_gpus"):
            gpus: tuple[int, ...] = getattr(self, name)
            if len(set(gpus)) != len(gpus) or any(gpu < 0 for gpu in gpus):
                raise ValueError(f"{name} = {list(gpus)} must be different numbers, 0 or higher")
            if gpus and self.gpus is not None and gpus != self._counted(name):
                raise ValueError(f"gpus and {name} exclude each other: remove one of them")
        return self

    def _counted(self, name: str) -> tuple[int, ...]:
        """The GPUs that `gpus` means. They are recorded next to it."""
        assert self.gpus is not None
        ranks, servers = self.gpus.trainer, self.gpus.policy
        return tuple(range(ranks)) if name == "trainer_gpus" else tuple(range(ranks, ranks + servers))

    def of_replica(self, number: int, replicas: int) -> tuple[int, ...]:
        each = len(self.policy_gpus) // replicas
        return self.policy_gpus[number * each : (number + 1) * each]

    @property
    def are_separate(self) -> bool:
        """Whether the trainer and the policy servers are on different GPUs, as far as it is known."""
        return bool(self.policy_gpus or self.trainer_gpus) and not set(self.policy_gpus) & set(self.trainer_gpus)
