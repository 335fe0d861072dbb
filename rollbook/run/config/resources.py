"""Assignment of the machine's GPUs to the processes of a run."""

from typing import Self

from pydantic import BaseModel, Field, model_validator


class ResourcesConfig(BaseModel, frozen=True, extra="forbid"):
    """GPUs of the processes, by their numbers on this machine. Each process sees only its own (CUDA_VISIBLE_DEVICES)."""

    policy_gpus: tuple[int, ...] = Field(default=())
    """GPUs of the policy servers, divided evenly among `inference.replicas` in this order. With vLLM, several for one replica mean
    tensor parallelism. Empty: every replica sees all GPUs and uses `inference.device`."""

    trainer_gpus: tuple[int, ...] = Field(default=())
    """GPUs of the trainer, one for each of `trainer.ranks`. Empty: the ranks use the first visible ones."""

    @model_validator(mode="after")
    def _check_numbers(self) -> Self:
        for name in ("policy_gpus", "trainer_gpus"):
            gpus: tuple[int, ...] = getattr(self, name)
            if len(set(gpus)) != len(gpus) or any(gpu < 0 for gpu in gpus):
                raise ValueError(f"{name} = {list(gpus)} must be different numbers, 0 or higher")
        return self

    def of_replica(self, number: int, replicas: int) -> tuple[int, ...]:
        each = len(self.policy_gpus) // replicas
        return self.policy_gpus[number * each : (number + 1) * each]

    @property
    def are_separate(self) -> bool:
        """Whether the trainer and the policy servers are on different GPUs, as far as it is known."""
        return bool(self.policy_gpus or self.trainer_gpus) and not set(self.policy_gpus) & set(self.trainer_gpus)
