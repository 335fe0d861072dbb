"""What an operator may set about learning."""

from typing import Any, Literal, Self

from pydantic import BaseModel, Field, model_validator

from rollbook.trainer.losses.defaults import OWN_SETTINGS, Recipe
from rollbook.trainer.model.config import SPECIAL_TOKENS, ModelBuildConfig, ModelConfig

__all__ = ["NOT_NUMERIC", "SPECIAL_TOKENS", "LoraSettings", "ModelBuildConfig", "ModelConfig", "TrainerConfig"]

# What decides when and where, but not which numbers come out of a step. Everything else is a numeric setting, so a field that
# is added later is compared on resume unless somebody says here that it need not be.
NOT_NUMERIC = frozenset(
    {
        "max_steps",
        "checkpoint_every",
        "keep_checkpoints",
        "keep_every",
        "watch_replicas_s",
        "publish_timeout_s",
    }
)


class LoraSettings(BaseModel, frozen=True, extra="forbid"):
    """Low-rank adapters: the model's own weights stand still, and small matrices beside them learn. Needs the extra `lora`."""

    rank: int = Field(default=16, ge=1)
    """Rank of the matrices."""

    alpha: int = Field(default=32, ge=1)
    """What the adapters add is scaled by alpha / rank."""

    targets: tuple[str, ...] | Literal["all-linear"] = "all-linear"
    """Names of the layers that get adapters, or all linear ones but the output embedding."""


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

    loss: str = "grpo"
    """Name in the table of losses: grpo, dr_grpo, dapo, gspo, cispo, importance_sampling, reinforce, decoupled, dro; or one's own,
    as `package.module:function`."""

    loss_options: dict[str, float] = Field(default_factory=dict)
    """Numbers for a loss of one's own; the losses of the table read none."""

    old_logprobs: Literal["snapshot", "engine"] = "snapshot"
    """What the clipped ratio is taken to. `snapshot`: the policy at the start of the step, so that clipping limits what one batch
    may change. `engine`: the policy that sampled the tokens, so that it also corrects and limits lag; needs an engine whose
    logprobs can be trusted, and costs no second pass with several minibatches."""

    clip_low: float | None = Field(default=None, ge=0, le=1)
    """The ratio is clipped below at 1 - clip_low. None: the loss's own (.2; gspo .0003; cispo 1, no clip below)."""

    clip_high: float | None = Field(default=None, ge=0)
    """The ratio is clipped above at 1 + clip_high. None: the loss's own (.2; dapo .28; gspo .0004; cispo 4)."""

    dual_clip: float | None = Field(default=None, gt=1)
    """Where the advantage is negative the loss ends at this times the advantage. None: the loss's own (dapo 3, others without)."""

    dro_beta: float | None = Field(default=None, gt=0)
    """Weight of the squared distance to the old policy in `dro`. None: .1."""

    behaviour_cap: float | None = Field(default=None, gt=0)
    """`decoupled` leaves out tokens whose weight old / sampled lies above this. None: leaves out none."""

    correction: Literal["none", "tis", "icepop", "mis"] = "none"
    """What multiplies each token's policy loss to correct for a sampler that differs from the trainer, w = old / sampled: nothing;
    min(w, bound); w inside [1/bound, bound] and else 0; w up to bound and else 0."""

    correction_level: Literal["token", "sequence"] | None = None
    """Whether w is a token's, or the geometric mean over its sequence. None: token."""

    correction_bound: float | None = Field(default=None, gt=1)
    """Where the correction cuts. None: 2."""

    kl_coef: float = Field(default=0.0, ge=0)
    """Weight of the divergence from the initial policy, with gradient. Above 0 a frozen copy is kept (LoRA: the base itself)."""

    entropy_bonus: float = Field(default=0.0, ge=0)
    """What a nat of entropy is worth beside the advantage: keeps a small policy from settling on the first thing that works."""

    advantage: Literal["group", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "maxrl"] | None = None
    """Baseline of a sample: mean and std of its group; mean only; mean of the others; mean and std of the whole batch; mean of its
    group and std of the batch; mean, divided by the mean. None: the loss's own (dr_grpo mean only, others group)."""

    overlong_tokens: int | None = Field(default=None, ge=1)
    """Trained tokens from which a sample's reward loses the whole of `overlong_penalty`. None: length costs nothing."""

    overlong_buffer: int | None = Field(default=None, ge=1)
    """Tokens before `overlong_tokens` over which the loss of reward rises from 0. None: half of them."""

    overlong_penalty: float | None = Field(default=None, gt=0)
    """What a sample of `overlong_tokens` or more loses. None: 1."""

    mask_truncated: bool = False
    """Leave samples that ended by a limit out of the loss; their rewards still count in their groups' baselines."""

    reduction: Literal["token_mean", "sequence_mean", "fixed_length"] | None = None
    """How token losses of a minibatch become one number: mean over tokens, mean over sequences of their token means, or the sum
    divided by sequences times `reduction_length`. None: the loss's own (dr_grpo fixed_length, gspo sequence_mean,
    others token_mean)."""

    reduction_length: int | None = Field(default=None, ge=1)
    """Tokens that stand for one sequence under `fixed_length`."""

    ppo_n_minibatches: int = Field(default=1, ge=1)
    """Optimizer steps a batch is split into."""

    max_tokens_per_microbatch: int = Field(default=16_384, ge=1)
    """Tokens that go through the model at once, padding included; a longer sequence goes alone."""

    packing: Literal["auto", "packed", "padded"] = "auto"
    """`packed`: sequences stand end to end in one row, and attention stays within each; nothing is padded. `padded`: one row each.
    `auto`: packed where the model's family lets its attention be replaced."""

    pass_cost_tokens: int = Field(default=192, ge=0)
    """Padded tokens that cost as much as one more pass through the model, where sequences are padded. Rows of similar length share
    a pass until their padding costs more than that; measured at about 150 on one CPU thread."""

    max_logits_mb: int = Field(default=256, ge=1)
    """Megabytes of float32 logits held at a time. They are computed in pieces, and again in the backward pass."""

    gradient_checkpointing: bool = False
    """Keep only the borders of layers and compute the inside again in the backward pass: less memory, a third more work."""

    lora: LoraSettings | None = None
    """Train low-rank adapters instead of all weights."""

    ranks: int = Field(default=1, ge=1)
    """Processes that share the model, its gradients and its optimizer (FSDP2), one GPU each, or on the CPU."""

    max_skipped_steps: int = Field(default=3, ge=1)
    """So many minibatches in a row whose gradient is not finite stop the run; fewer are skipped and reported."""

    skip_grad_norm_above: float | None = Field(default=None, gt=0)
    """A minibatch whose gradient norm lies above is skipped and reported like one that is not finite. None: never."""

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

    keep_every: int | None = Field(default=None, ge=1)
    """Checkpoints of steps that this divides are kept for good. None: only the newest."""

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
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas {self.betas} must lie in [0, 1)")
        self._check_loss()
        self._check_correction()
        if self.overlong_tokens is None and (self.overlong_buffer or self.overlong_penalty):
            raise ValueError("overlong_buffer and overlong_penalty are read where overlong_tokens is set")
        if self.overlong_tokens is not None and (self.overlong_buffer or 1) > self.overlong_tokens:
            raise ValueError(
                f"overlong_buffer {self.overlong_buffer} begins before the first of {self.overlong_tokens}"
            )
        if self.keep_every is not None and self.keep_every % self.checkpoint_every:
            raise ValueError(
                f"keep_every {self.keep_every} is no multiple of checkpoint_every {self.checkpoint_every}: some of the steps"
                " it names have no checkpoint"
            )
        if self.ranks > 1 and self.lora is not None:
            raise ValueError("adapters are small enough for one process: lora and ranks above 1 do not go together")
        return self

    def _check_loss(self) -> None:
        if ":" in self.loss:
            if self.advantage is None or self.reduction is None:
                raise ValueError("a loss of one's own has no usual advantage and reduction: set both")
        elif self.loss not in OWN_SETTINGS:
            raise ValueError(
                f"there is no loss {self.loss!r}: name one of {', '.join(OWN_SETTINGS)}, or your own as package.module:function"
            )
        else:
            unread = sorted(name for name in self._loss_settings() if name not in OWN_SETTINGS[self.loss])
            if unread:
                raise ValueError(f"loss {self.loss!r} does not read {', '.join(unread)}: leave it out")
        if (self.recipe.reduction == "fixed_length") != (self.reduction_length is not None):
            raise ValueError("reduction_length is needed by reduction 'fixed_length', and read by no other")

    def _loss_settings(self) -> dict[str, Any]:
        """Those that only some losses read, as far as they were set."""
        named = ("clip_low", "clip_high", "dual_clip", "dro_beta", "behaviour_cap")
        found = {name: getattr(self, name) for name in named if getattr(self, name) is not None}
        return {**found, **({"loss_options": self.loss_options} if self.loss_options else {})}

    def _check_correction(self) -> None:
        if self.correction == "none":
            if self.correction_level is not None or self.correction_bound is not None:
                raise ValueError("correction_level and correction_bound are read by a correction, and none is set")
            return
        if self.old_logprobs == "engine":
            raise ValueError(
                "old_logprobs = 'engine' takes the ratio to the sampling policy already: a correction would do it twice"
            )
        if self.loss == "decoupled":
            raise ValueError("loss 'decoupled' weighs by old / sampled itself: a correction would do it twice")

    @property
    def recipe(self) -> Recipe:
        """What is computed, with the loss's own values where nothing else was set."""
        own: dict[str, Any] = OWN_SETTINGS.get(self.loss, {})
        return Recipe(
            loss=self.loss,
            clip_low=self.clip_low if self.clip_low is not None else own.get("clip_low"),
            clip_high=self.clip_high if self.clip_high is not None else own.get("clip_high"),
            dual_clip=self.dual_clip if self.dual_clip is not None else own.get("dual_clip"),
            dro_beta=self.dro_beta if self.dro_beta is not None else own.get("dro_beta"),
            behaviour_cap=self.behaviour_cap if self.behaviour_cap is not None else own.get("behaviour_cap"),
            loss_options=self.loss_options,
            advantage=self.advantage or own.get("advantage", "group"),
            reduction=self.reduction or own.get("reduction", "token_mean"),
            correction_level=self.correction_level or "token",
            correction_bound=self.correction_bound or 2.0,
            overlong_buffer=self.overlong_buffer or -(-(self.overlong_tokens or 0) // 2),
            overlong_penalty=self.overlong_penalty or 1.0,
        )

    def numeric_settings(self) -> dict[str, Any]:
        """The settings that decide which numbers a step gives, as JSON values: what must not change under undurable steps."""
        settings = self.model_dump(mode="json", exclude=set(NOT_NUMERIC))
        settings |= {name: value for name, value in self.recipe.as_settings().items() if settings.get(name) is None}
        if self.schedule != "constant":
            settings["max_steps"] = self.max_steps
        return settings
