"""Settings of supervised fine-tuning."""

from typing import Literal, Self

from pydantic import BaseModel, Field, model_validator

from rollbook.trainer.config import TrainerConfig

READ_BY_SFT = frozenset(
    {
        "max_steps",
        "lr",
        "optimizer",
        "optimizer_state",
        "betas",
        "eps",
        "weight_decay",
        "max_grad_norm",
        "warmup_steps",
        "schedule",
        "max_tokens_per_microbatch",
        "pass_cost_tokens",
        "reduction",
        "reduction_length",
        "device",
        "compute_dtype",
        "threads",
        "seed",
        "checkpoint_every",
        "keep_checkpoints",
        "keep_every",
        "gradient_checkpointing",
        "gpu_memory_gb",
        "packing",
        "max_logits_mb",
        "lora",
        "ranks",
        "shards_path",
        "max_skipped_steps",
        "skip_grad_norm_above",
    }
)
"""Fields of `[trainer]` that apply without rewards, a ledger and policy servers. Any other field is rejected."""


class SftConfig(BaseModel, frozen=True, extra="forbid"):
    """Demonstrations and how they are trained. Read by `rollbook sft`."""

    data: str = Field(min_length=1)
    """A JSONL file of chats, one `{"messages": [{"role": …, "content": …}, …]}` per line, relative to the config file. `tools` and
    `template` of a line are passed to the chat template. An assistant message with `"weight": 0` is not trained. Lines of
    `rollbook export --tokens` have tokens instead."""

    validation: str | None = Field(default=None, min_length=1)
    """A file of the same format whose loss is measured and never trained."""

    validation_share: float = Field(default=0.0, ge=0, lt=1)
    """Without a validation file: the fraction of the demonstrations, chosen by a hash of their content, kept for validation."""

    examples_per_step: int = Field(default=32, ge=1)
    """Demonstrations of one optimizer step."""

    epochs: int = Field(default=1, ge=1)
    """How often every demonstration is trained, reshuffled each time; `trainer.max_steps` may end training sooner."""

    max_tokens: int = Field(default=2048, ge=2)
    """The longest demonstration, in tokens."""

    bad_lines: Literal["refuse", "skip"] = "refuse"
    """What happens to lines that cannot be trained (not JSON, no assistant message, too long). `refuse`: stop and list them all.
    `skip`: list them and train the others."""

    evaluate_every: int = Field(default=50, ge=1)
    """Steps between evaluations of the validation loss; it is also evaluated at the start and at the end."""

    enough_loss: float | None = Field(default=None, gt=0)
    """Stop at the first evaluation whose validation loss is at most this: a policy that is still uncertain leaves room for
    reinforcement learning. None: train all epochs."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.enough_loss is not None and self.validation is None and self.validation_share == 0:
            raise ValueError("enough_loss needs a validation loss: set validation or validation_share")
        if self.validation is not None and self.validation_share > 0:
            raise ValueError("validation and validation_share exclude each other: remove one of them")
        return self


def sft_trainer(config: TrainerConfig) -> TrainerConfig:
    """The trainer settings with the loss of supervised learning: REINFORCE with advantage 1 for every assistant token."""
    return config.model_copy(update={"loss": "reinforce", "missing_logprobs": "recompute"})


def unread_settings(named: set[str]) -> list[str]:
    """Fields of `[trainer]` that supervised fine-tuning would ignore."""
    return sorted(named - READ_BY_SFT)
