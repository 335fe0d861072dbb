"""What an operator may set about the model and about learning."""

from typing import Any, Literal, Self

from pydantic import BaseModel, Field, model_validator

SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<unk>")
"""Ids 0 to 3 of a tokenizer that is built on the spot, in this order."""


class ModelBuildConfig(BaseModel, frozen=True, extra="forbid"):
    """A small model made on the spot: seeded random weights and a tokenizer whose tokens are whole words."""

    family: Literal["llama"] = "llama"
    """Architecture."""

    hidden_size: int = Field(default=128, ge=8)
    """Width of the residual stream."""

    layers: int = Field(default=4, ge=1)
    """Number of transformer blocks."""

    heads: int = Field(default=4, ge=1)
    """Attention heads; must divide `hidden_size` into an even head width."""

    kv_heads: int = Field(default=2, ge=1)
    """Key and value heads; must divide `heads`."""

    intermediate_size: int = Field(default=352, ge=8)
    """Width of the feed-forward part."""

    max_position_embeddings: int = Field(default=256, ge=8)
    """Longest sequence, in tokens."""

    tie_embeddings: bool = True
    """Use one matrix for the input and the output embedding."""

    initializer_range: float = Field(default=0.02, gt=0)
    """Standard deviation of the initial weights. Very small models start to learn sooner with more."""

    tokenizer: Literal["words", "bytes"] = "words"
    """`words`: one token for each word of the vocabulary. `bytes`: one token for each byte, so that any text can be said."""

    vocabulary: tuple[str, ...] = ()
    """Words of the tokenizer, without spaces; the special tokens <pad> <bos> <eos> <unk> come before them."""

    chat_template: str | None = None
    """Jinja template that renders messages; None for a tokenizer without one."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.hidden_size % self.heads or (self.hidden_size // self.heads) % 2:
            raise ValueError(f"hidden_size {self.hidden_size} does not split into {self.heads} heads of even width")
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads {self.kv_heads} does not divide heads {self.heads}")
        if self.tokenizer == "words" and not self.vocabulary:
            raise ValueError("vocabulary is empty: name the words, or set tokenizer = 'bytes'")
        if self.tokenizer == "bytes" and self.vocabulary:
            raise ValueError("vocabulary is read by tokenizer = 'words' only; a byte is a token of its own")
        words = (*SPECIAL_TOKENS, *self.vocabulary)
        twice = sorted({word for word in words if words.count(word) > 1})
        if twice:
            raise ValueError(f"vocabulary names {', '.join(twice)} more than once (the special tokens are included)")
        broken = [word for word in self.vocabulary if not word or word.split() != [word]]
        if broken:
            raise ValueError(f"vocabulary words must not be empty or contain spaces: {broken!r}")
        return self

    @property
    def vocab_size(self) -> int:
        return len(SPECIAL_TOKENS) + (256 if self.tokenizer == "bytes" else len(self.vocabulary))


class ModelConfig(BaseModel, frozen=True, extra="forbid"):
    """Which model is trained: one that exists (`path`) or one that is made on the spot (`build`)."""

    path: str | None = None
    """Hugging Face model: a directory, or a name on the hub."""

    build: ModelBuildConfig | None = None
    """Make a small model instead."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.path is None) == (self.build is None):
            raise ValueError(
                "name exactly one of `path` (a model that exists) and `build` (a small one made on the spot)"
            )
        return self


# What decides when and where, but not which numbers come out of a step. Everything else is a numeric setting, so a field that
# is added later is compared on resume unless somebody says here that it need not be.
NOT_NUMERIC = frozenset(
    {
        "max_steps",
        "checkpoint_every",
        "keep_checkpoints",
        "watch_replicas_s",
        "publish_timeout_s",
    }
)


class TrainerConfig(BaseModel, frozen=True, extra="forbid"):
    """How the model learns from the batches of the ledger."""

    max_steps: int | None = Field(default=None, ge=1)
    """End the run after this many steps; None goes on to the end of the data. The linear and cosine schedules need it."""

    lr: float = Field(default=1e-6, gt=0)
    """Learning rate after warm-up."""

    betas: tuple[float, float] = (0.9, 0.999)
    """AdamW: decay of the running mean of the gradient and of its square."""

    eps: float = Field(default=1e-8, gt=0)
    """AdamW: added to the denominator."""

    weight_decay: float = Field(default=0.0, ge=0)
    """AdamW: decoupled decay of matrices; vectors (norms, biases) do not decay."""

    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradients are scaled down to this global norm."""

    warmup_steps: int = Field(default=0, ge=0)
    """Steps over which the learning rate rises linearly from lr/warmup_steps to lr."""

    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after warm-up: unchanged, or falling to 0 at `max_steps`."""

    loss: Literal["grpo"] = "grpo"
    """Name in the table of losses; grpo is the clipped ratio."""

    old_logprobs: Literal["snapshot", "engine"] = "snapshot"
    """What the clipped ratio is taken to. `snapshot`: the policy at the start of the step, so that clipping limits what one batch
    may change. `engine`: the policy that sampled the tokens, so that it also corrects and limits lag; needs an engine whose
    logprobs can be trusted, and costs no second pass with several minibatches."""

    clip_low: float = Field(default=0.2, ge=0, le=1)
    """The ratio is clipped below at 1 - clip_low."""

    clip_high: float = Field(default=0.2, ge=0)
    """The ratio is clipped above at 1 + clip_high."""

    entropy_bonus: float = Field(default=0.0, ge=0)
    """What a nat of entropy is worth beside the advantage: keeps a small policy from settling on the first thing that works."""

    advantage: Literal["group", "dr_grpo", "rloo"] = "group"
    """Baseline over a group's scorable samples: mean and std, mean only, or mean of the others."""

    reduction: Literal["token_mean", "sequence_mean", "fixed_length"] = "token_mean"
    """How token losses of a minibatch become one number: mean over tokens, mean over sequences of their token means, or the sum
    divided by sequences times `reduction_length`."""

    reduction_length: int | None = Field(default=None, ge=1)
    """Tokens that stand for one sequence under `fixed_length`."""

    ppo_n_minibatches: int = Field(default=1, ge=1)
    """Optimizer steps a batch is split into."""

    max_tokens_per_microbatch: int = Field(default=16_384, ge=1)
    """Padded tokens that go through the model at once; a longer sequence goes alone."""

    pass_cost_tokens: int = Field(default=192, ge=0)
    """Padded tokens that cost as much as one more pass through the model. Rows of similar length share a pass until their padding
    costs more than that; measured at about 150 on one CPU thread; on an H200, 8192 trains a 135M model 3 times as fast as 192."""

    missing_logprobs: Literal["refuse", "recompute"] = "refuse"
    """Trained tokens without a sampling logprob stop the run, or are taken to be sampled by the step's starting policy."""

    device: Literal["cpu", "cuda"] = "cpu"
    """Where the model learns."""

    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of matrix products in the passes; weights and optimizer are float32 always."""

    threads: int = Field(default=1, ge=1)
    """CPU threads of a step. Fixed, because the number of threads changes the last bits of sums."""

    seed: int = 0
    """Decides initial weights of a built model and how a batch is shuffled into minibatches."""

    checkpoint_every: int = Field(default=20, ge=1)
    """Steps between checkpoints. What lies behind the last one is trained again after a crash."""

    keep_checkpoints: int = Field(default=2, ge=1)
    """Newest checkpoints that are kept."""

    watch_replicas_s: float = Field(default=2.0, gt=0)
    """Seconds between looks at what the policy servers report; one that differs gets the weights again."""

    publish_timeout_s: float = Field(default=600.0, gt=0)
    """How long a publication is tried again while policy servers are away."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.schedule != "constant" and self.max_steps is None:
            raise ValueError(f"schedule {self.schedule!r} falls to 0 at max_steps, which is not set")
        if self.max_steps is not None and self.warmup_steps >= self.max_steps:
            raise ValueError(f"warmup_steps {self.warmup_steps} leaves nothing of max_steps {self.max_steps}")
        if (self.reduction == "fixed_length") != (self.reduction_length is not None):
            raise ValueError("reduction_length is needed by reduction 'fixed_length', and read by no other")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas {self.betas} must lie in [0, 1)")
        return self

    def numeric_settings(self) -> dict[str, Any]:
        """The settings that decide which numbers a step gives, as JSON values: what must not change under undurable steps."""
        settings = self.model_dump(mode="json", exclude=set(NOT_NUMERIC))
        if self.schedule != "constant":
            settings["max_steps"] = self.max_steps
        return settings
