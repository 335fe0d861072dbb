"""What an operator may set about a warm start from demonstrations."""

from typing import Literal, Self

from pydantic import BaseModel, Field, model_validator

from rollbook.trainer.config import TrainerConfig

READ_BY_SFT = frozenset(
    {
        "max_steps",
        "lr",
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
        "packing",
        "max_logits_mb",
        "lora",
        "max_skipped_steps",
        "skip_grad_norm_above",
    }
)
"""Fields of `[trainer]` that mean something without rewards, batches of a ledger and policy servers. Any other is refused."""


class SftConfig(BaseModel, frozen=True, extra="forbid"):
    """Demonstrations and how they are gone through. Read by `rollbook sft`."""

    data: str = Field(min_length=1)
    """A JSONL file of chats, one `{"messages": [{"role": …, "content": …}, …]}` a line, relative to the config file."""

    validation: str | None = Field(default=None, min_length=1)
    """A file of the same form whose loss is measured and never trained."""

    validation_share: float = Field(default=0.0, ge=0, lt=1)
    """Without a file of its own: this part of the demonstrations, chosen by their content, is kept for validation."""

    examples_per_step: int = Field(default=32, ge=1)
    """Demonstrations of one optimizer step."""

    epochs: int = Field(default=1, ge=1)
    """How often every demonstration is trained, in an order of its own each time; `trainer.max_steps` may end it sooner."""

    max_tokens: int = Field(default=2048, ge=2)
    """The longest demonstration, in tokens."""

    bad_lines: Literal["refuse", "skip"] = "refuse"
    """What becomes of lines that cannot be trained (not JSON, no assistant, too long): nothing is trained and all are named, or
    they are named and left out."""

    evaluate_every: int = Field(default=50, ge=1)
    """Steps between measurements of the validation loss; it is measured at the start and at the end too."""

    enough_loss: float | None = Field(default=None, gt=0)
    """End at the first measurement, every `evaluate_every` steps, whose validation loss is at most this: a policy that still
    hesitates has something left for reward to strengthen. None: the epochs end it."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.enough_loss is not None and self.validation is None and self.validation_share == 0:
            raise ValueError("enough_loss is about the validation loss: set validation or validation_share")
        if self.validation is not None and self.validation_share > 0:
            raise ValueError("validation names a file, so validation_share would never be read; remove one of them")
        return self


def sft_trainer(config: TrainerConfig) -> TrainerConfig:
    """The same step, with the loss that a demonstration means: every token of the assistant was right, by one unit of reward."""
    return config.model_copy(update={"loss": "reinforce", "missing_logprobs": "recompute"})


def unread_settings(named: set[str]) -> list[str]:
    """Fields of `[trainer]` that a warm start would ignore."""
    return sorted(named - READ_BY_SFT)
