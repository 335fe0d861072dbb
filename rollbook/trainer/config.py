"""Settings of the trainer."""

from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import BaseModel, Field, model_validator

from rollbook.contracts.user_errors import did_you_mean
from rollbook.trainer.loss_settings import ADVANTAGE_DEFAULTS, LOSS_DEFAULTS, LOSS_NUMBERS, Recipe

# Settings that do not change the numbers of a step. Every other field is compared on resume, including fields added later.
NOT_NUMERIC = frozenset(
    {
        "max_steps",
        "checkpoint_every",
        "keep_checkpoints",
        "keep_every",
        "checkpoint_copy",
        "shards_path",
        "watch_replicas_s",
        "publish_timeout_s",
        "gpu_memory_gb",
        "max_sequence_tokens",
    }
)
SPLIT_SETTINGS = ("max_tokens_per_microbatch", "gradient_checkpointing")
"""How a batch is split into passes. A change changes bits, not the method: these settings may change on every resume, because each
step is acknowledged with its split, and replayed with it."""
DEFAULT_TOKENS_PER_PASS = 16_384


def effective_exactness(settings: Mapping[str, Any]) -> str:
    """`exactness` changes bits on a GPU in bfloat16 only. `settings`: those that decide the numbers of a step."""
    has_choice = settings.get("device") == "cuda" and settings.get("compute_dtype") == "bfloat16"
    return str(settings["exactness"]) if has_choice else "fast"


class LoraSettings(BaseModel, frozen=True, extra="forbid"):
    """Low-rank adapters: the base weights are frozen and small added matrices are trained. Needs the extra `lora`."""

    rank: int = Field(default=16, ge=1)
    """Rank of the matrices."""

    alpha: int = Field(default=32, ge=1)
    """The output of the adapters is scaled by alpha / rank."""

    targets: tuple[str, ...] | Literal["all-linear"] = "all-linear"
    """Names of the layers that get adapters, or all linear layers but the output embedding."""

    experts: bool = False
    """Mixtures of experts: also adapt the weights of the experts. `inference.publish = "auto"` then means merged weights, because
    the embedded engine adapts linear layers only."""


class TrainerConfig(BaseModel, frozen=True, extra="forbid"):
    """How the model is trained on the batches of the ledger."""

    max_steps: int | None = Field(default=None, ge=1)
    """End the run after this many steps; None: train to the end of the data. The linear and cosine schedules need it."""

    lr: float | None = Field(default=None, gt=0)
    """Learning rate after warm-up. Unset: from the width of the model, 1e-6 × (4096 / width)^1.5, at least 1e-6; ten times as much
    with LoRA. That is 5e-4 for a width of 64, 1.9e-5 for 576 (SmolLM2-135M), 4e-6 for 1536 and 1e-6 from 4096 on."""

    optimizer: Literal["adamw", "muon"] = "adamw"
    """`muon` trains the matrices of hidden layers with Muon, scaled to the update size of AdamW so that `lr` means the same, and
    embeddings, output and vectors with AdamW. With one rank only."""

    optimizer_state: Literal["device", "host", "8bit"] = "device"
    """Where AdamW keeps its two averages. `device`: in float32, where the model is: 8 bytes a parameter. `host`: in main memory,
    and copied through the GPU in every step; the same bits. `8bit`: on the device, quantised: 2 bytes a parameter; needs the extra
    `quantized`. `host` and `8bit` need `optimizer = "adamw"` and one rank."""

    betas: tuple[float, float] = (0.9, 0.999)
    """AdamW: decay of the running mean of the gradient and of its square."""

    eps: float = Field(default=1e-8, gt=0)
    """AdamW: added to the denominator."""

    weight_decay: float = Field(default=0.01, ge=0)
    """AdamW: decoupled weight decay of matrices; vectors (norms, biases) are not decayed."""

    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradients are clipped to this global norm."""

    warmup_steps: int = Field(default=0, ge=0)
    """Steps over which the learning rate rises linearly from lr/warmup_steps to lr."""

    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after warm-up: constant, or decaying to 0 at `max_steps`."""

    loss: str = "dapo"
    """A built-in loss (grpo, dr_grpo, dapo, gspo, gspo_token, cispo, sapo, dppo, m2po, importance_sampling, reinforce, decoupled,
    dro, distill), or your own as `package.module:function`."""

    loss_options: dict[str, float] = Field(default_factory=dict)
    """Numbers for your own loss; built-in losses read none."""

    old_logprobs: Literal["snapshot", "engine"] | None = None
    """The denominator of the ratio. `engine`: the policy that sampled the tokens, so that the ratio corrects for lag; saves the
    second pass with several minibatches. `snapshot`: the policy at the start of the step, so that clipping limits the change of one
    batch only. None: snapshot with a correction and for decoupled, dro, reinforce and your own loss; otherwise engine."""

    clip_low: float | None = Field(default=None, ge=0, le=1)
    """Lower clip of the ratio, 1 - clip_low. None: the loss's default (.2; gspo .03; cispo 1, no lower clip)."""

    clip_high: float | None = Field(default=None, ge=0)
    """Upper clip of the ratio, 1 + clip_high. None: the loss's default (.2; dapo .28; gspo .04; cispo 4)."""

    dual_clip: float | None = Field(default=None, gt=1)
    """Cap of the loss where the advantage is negative, as a multiple of it. None: the loss's default (dapo 3, others no cap)."""

    dro_beta: float | None = Field(default=None, gt=0)
    """Weight of the squared distance to the old policy in `dro`. None: .1."""

    behaviour_cap: float | None = Field(default=None, gt=0)
    """`decoupled` masks tokens whose weight old / sampled is above this. None: masks none."""

    sapo_tau: float | None = Field(default=None, gt=0)
    """`sapo`: steepness of the sigmoid where the advantage is positive. None: 1."""

    sapo_tau_negative: float | None = Field(default=None, gt=0)
    """`sapo`: steepness of the sigmoid where the advantage is negative. None: 1.05."""

    divergence_bound: float | None = Field(default=None, gt=0, le=1)
    """`dppo` masks tokens whose probability moved by more than this in the direction of their advantage. None: .15."""

    m2_bound: float | None = Field(default=None, gt=0)
    """`m2po` masks the tokens with the largest (log ratio)² of a pass, until the mean of the others is at most this. None: .04."""

    off_policy_mask: float | None = Field(default=None, gt=0)
    """Mask sequences with a negative advantage whose mean of log sampled − log current is above this, with any loss (off-policy
    sequence masking of DeepSeek-V3.2). None: mask none."""

    observation_coef: float = Field(default=0.0, ge=0)
    """Weight of the cross-entropy of the environment's tokens between the turns: the policy also learns to predict what its
    actions lead to (ECHO). 0: they are not trained."""

    correction: Literal["none", "tis", "icepop", "mis"] = "none"
    """Importance weight of each token's policy loss that corrects for numerical differences between engine and trainer, with
    w = old / sampled. `none`: 1. `tis`: min(w, bound). `icepop`: w inside [1/bound, bound], else 0. `mis`: w inside
    [correction_low, bound], else 0."""

    correction_level: Literal["token", "sequence_mean", "sequence_sum", "sequence"] | None = None
    """`token`: w of each token. `sequence_mean`: the geometric mean over the sequence, which does not depend on its length
    (`sequence` is an old name of it). `sequence_sum`: exp of the sum of log w, the ratio of the whole sequence, as in TRL. None:
    token."""

    correction_bound: float | None = Field(default=None, gt=1)
    """The bound of the correction. None: 2."""

    correction_low: float | None = Field(default=None, gt=0, lt=1)
    """Lower bound of `mis`: the loss of tokens with a lower weight is 0 too. None: no lower bound."""

    kl_coef: float = Field(default=0.0, ge=0)
    """Weight of the KL divergence from the initial policy. Above 0, a frozen copy is kept (LoRA: the base model)."""

    kl_estimator: Literal["k2", "k3", "k3_weighted"] | None = None
    """The penalty of a token, with d = log reference - log current. `k2`: d²/2, whose gradient is that of KL(policy ‖ reference)
    for tokens of the current policy. `k3_weighted`: (exp(d) - d - 1) × current / sampled, whose gradient is right at any lag, with
    more variance. `k3`: exp(d) - d - 1, whose gradient is that of KL(reference ‖ policy). None: k2."""

    router_loss: float = Field(default=0.0, ge=0)
    """Mixtures of experts: weight of the loss that balances the load of the experts, as in the Switch Transformer. Pretraining uses
    about 0.001; 0, as usual for RL: not used."""

    freeze_routers: bool = False
    """Mixtures of experts: do not train the routers, nor adapters of them."""

    router_replay: bool = False
    """Mixtures of experts: train with the experts that the sampler chose, and gate weights of the trainer's router. Without it,
    engine and trainer decide near ties differently, and log-probabilities jump. The choices are stored with the tokens: one byte
    for each layer and choice, a third less when compressed. Turns on `inference.record_routes`."""

    entropy_bonus: float = Field(default=0.0, ge=0)
    """Weight of the entropy bonus. Keeps a small policy from converging to the first action that works."""

    advantage: str | None = None
    """Baseline of a sample. `group`: mean and std of its group; `dr_grpo`: mean only; `rloo`: mean of the others;
    `reinforce_pp`: mean and std over the tokens of the batch; `reinforce_pp_baseline`: mean of its group, then the same; `maxrl`:
    mean, divided by the mean; `none`: 0, for distillation alone; `gdpo`: mean and std of each reward function in its group, then
    over the batch. Of a turn: `turn_group`, `turn_rloo`, `gigpo` (docs/credit.md). Of a token: `producer`, as the rollout
    function computed it. 1e-4 is
    added to a std. Or your own function as package.module:function, see docs/writing-a-loss.md. None: the loss's default (dr_grpo
    for dr_grpo, none for distill, others group), or the producer's advantages of a sequence that has them (not for distill)."""

    turn_discount: float | None = Field(default=None, gt=0, le=1)
    """Discount of a reward for each turn between an action and the reward, in `turn_group`, `turn_rloo` (None: 1) and `gigpo`
    (None: .95)."""

    gigpo_weight: float | None = Field(default=None, ge=0)
    """Weight of the comparison at equal states in `gigpo`, next to that of the episodes. None: 1."""

    reward_weights: dict[str, float] | None = None
    """Weight of each reward function in `gdpo`, by name; `environment` is the reward of the episode. Functions that are not listed
    have their weight of `rollout.rewards`. None: all do."""

    distill_coef: float | None = Field(default=None, ge=0)
    """Weight of the divergence from the teacher. Needs `[rollout.teacher]`, or a rollout function that sets the scores. None: 1
    with `loss = "distill"`, where rewards do not count, otherwise 0."""

    distill_kl: Literal["sampled", "reverse", "forward"] = "sampled"
    """`sampled`: log teacher − log sampled is added to the advantage of each token; its expected gradient is that of the reverse KL
    divergence. `reverse`, `forward`: KL(policy ‖ teacher) or KL(teacher ‖ policy) over the teacher's likeliest tokens, at each
    trained token, is added to the loss; needs `rollout.teacher.top_k`."""

    distill_until: int | None = Field(default=None, ge=1)
    """The step at which the weight has fallen linearly to 0. None: it stays."""

    overlong_tokens: int | None = Field(default=None, ge=1)
    """Trained tokens from which a sample's reward is reduced by the full `overlong_penalty`. None: no length penalty."""

    overlong_buffer: int | None = Field(default=None, ge=1)
    """Tokens before `overlong_tokens` over which the penalty rises from 0. None: half of `overlong_tokens`."""

    overlong_penalty: float | None = Field(default=None, gt=0)
    """The reward penalty of a sample with `overlong_tokens` or more. None: 1."""

    mask_truncated: bool = False
    """Exclude truncated samples from the loss; their rewards still count in their groups' baselines."""

    reduction: Literal["token_mean", "sequence_mean", "fixed_length"] | None = None
    """How the token losses of a minibatch are reduced. `token_mean`: mean over tokens. `sequence_mean`: mean over samples of
    their token means. `fixed_length`: sum, divided by samples times `reduction_length`. A sample counts once, however many
    sequences it has; scorable samples whose tokens are all masked count with a loss of 0. None: the loss's default (dr_grpo
    fixed_length, gspo sequence_mean, others token_mean)."""

    reduction_length: int | None = Field(default=None, ge=1)
    """Tokens per sample in the denominator of `fixed_length`."""

    ppo_n_minibatches: int = Field(default=1, ge=1)
    """Optimizer steps per batch and epoch."""

    ppo_epochs: int = Field(default=1, ge=1)
    """How often each batch is trained, in minibatches that are shuffled anew."""

    max_tokens_per_microbatch: int | None = Field(default=None, ge=1)
    """Computed tokens per forward pass, padding included; a longer sequence gets its own pass. On a GPU, the memory plan chooses at
    most as many as take a quarter of its memory; without a plan they are measured when the model is loaded. A pass of that size is
    tried before the first step, and what fits is recorded. Without a GPU: 16384, or the most of 8192, 4096, 2048 and 1024 that fit
    into main memory."""

    packing: Literal["auto", "packed", "padded"] = "auto"
    """`packed`: sequences are concatenated in one row, with attention inside each sequence only, without padding, and tokens that
    they have in common at their start are computed once. `padded`: one sequence per row. `auto`: packed where the model's
    attention can be replaced."""

    pass_cost_tokens: int = Field(default=192, ge=0)
    """With `padded`: the fixed cost of a forward pass, in padding tokens. Rows share a pass until their padding costs more than
    another pass; measured at about 150 on one CPU thread. On a GPU: 8192."""

    max_logits_mb: int | None = Field(default=None, ge=1)
    """Megabytes of float32 logits held at a time (256, or 2,048 on a GPU if they fit). Logits are computed in chunks, and
    recomputed in the backward pass."""

    gradient_checkpointing: bool | int = Field(default=False, ge=0)
    """Recompute the activations inside layers in the backward pass: less memory, a third more compute. A number: of so many layers,
    from the first one on. On a GPU, the memory plan chooses the smallest number with which passes that keep the GPU busy fit;
    without one it is on only if the smallest passes do not fit into main memory otherwise."""

    lora: LoraSettings | None = None
    """Train low-rank adapters instead of all weights."""

    ranks: int = Field(default=1, ge=1)
    """Processes that shard the model, its gradients and its optimizer (FSDP2), with one GPU each, or on the CPU."""

    max_skipped_steps: int = Field(default=3, ge=1)
    """This many consecutive minibatches with a gradient that is not finite stop the run; fewer are skipped and reported."""

    skip_grad_norm_above: float | None = Field(default=None, gt=0)
    """Skip minibatches with a gradient norm above this, as if it were not finite. None: never."""

    missing_logprobs: Literal["refuse", "recompute"] = "refuse"
    """Trained tokens without a sampling logprob: stop the run, or use the logprobs of the policy at the start of the step."""

    device: Literal["cpu", "cuda"] = "cpu"
    """The training device. A GPU, if there is one."""

    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the forward and backward passes; weights and optimizer state are always float32. On a GPU bfloat16."""

    threads: int = Field(default=1, ge=1)
    """CPU threads of a step. Fixed, because the number of threads changes the last bits of sums. 1; with a GPU up to 4."""

    max_sequence_tokens: int | None = Field(default=None, ge=2)
    """Longest sequence that is trained, in tokens. The ledger refuses a group with a longer one when it is submitted: it is counted
    as invalid with this reason, and no step fails. Unset: the model's context; on a GPU less, if the memory plan has no room for a
    sequence of that length in a pass of its own, with gradient checkpointing of all layers. Fixed for a run."""

    exactness: Literal["bitwise", "fast"] = "bitwise"
    """`bitwise`: on a GPU, in bfloat16, logprobs have the same bits as those of the policy server, for the models of its fast
    forward, and gradients are summed in a fixed order. `fast`: sums may have any order. A run is
    exact if `inference.exactness` is `bitwise` too, and the policy server runs the adapters unmerged."""

    gpu_memory_gb: float | None = Field(default=None, gt=0)
    """Most memory that tensors of the trainer may take of its GPU, in GB. Chosen by the memory plan if `run.gpu_memory_gb` is
    set."""

    seed: int = 0
    """Seed of the initial weights of a built model and of the shuffling into minibatches."""

    checkpoint_every: int = Field(default=20, ge=1)
    """Steps between checkpoints. Steps after the last checkpoint are trained again after a crash."""

    keep_checkpoints: int = Field(default=2, ge=1)
    """How many of the newest checkpoints are kept."""

    checkpoint_copy: Literal["main_memory", "gpu"] = "main_memory"
    """Where weights and optimizer state are copied for a checkpoint, which is written while the next steps train. `gpu`: in
    milliseconds, but 12 more bytes for each trained parameter there; chosen by the memory plan if they fit. `main_memory`: the next
    step waits for the copy."""

    keep_every: int | None = Field(default=None, ge=1)
    """Keep the checkpoints of every n-th step for good. None: only the newest."""

    shards_path: str | None = None
    """Where all ranks write their shards of a checkpoint, concurrently: a directory that all ranks see, or `s3://bucket/prefix`
    (`pip install '.[s3]'`). Shards hold weights and optimizer state. None: `checkpoints/shards` in the run directory; with
    one rank, no shards. The rest of a checkpoint stays in the run directory, with the model as a Hugging Face directory."""

    watch_replicas_s: float = Field(default=2.0, gt=0)
    """Seconds between checks of the policy servers' versions; a server with another version gets the weights again."""

    publish_timeout_s: float = Field(default=600.0, gt=0)
    """How long a publication is retried while policy servers are unreachable."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.schedule != "constant" and self.max_steps is None:
            raise ValueError(f"schedule {self.schedule!r} decays to 0 at max_steps: set max_steps")
        if self.max_steps is not None and self.warmup_steps >= self.max_steps:
            raise ValueError(f"warmup_steps {self.warmup_steps} must be below max_steps {self.max_steps}")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas {self.betas} must be in [0, 1)")
        if self.optimizer == "muon" and self.ranks > 1:
            raise ValueError(
                "optimizer 'muon' needs whole matrices, and several ranks shard them: use adamw, or one rank"
            )
        self._check_optimizer_state()
        self._check_loss()
        self._check_advantage()
        self._check_correction()
        self._check_distillation()
        if self.overlong_tokens is None and (self.overlong_buffer or self.overlong_penalty):
            raise ValueError("overlong_buffer and overlong_penalty need overlong_tokens")
        if self.overlong_tokens is not None and (self.overlong_buffer or 1) > self.overlong_tokens:
            raise ValueError(
                f"overlong_buffer {self.overlong_buffer} must be at most overlong_tokens {self.overlong_tokens}"
            )
        if self.keep_every is not None and self.keep_every % self.checkpoint_every:
            raise ValueError(
                f"keep_every {self.keep_every} must be a multiple of checkpoint_every {self.checkpoint_every}:"
                " other steps have no checkpoint"
            )
        if self.shards_path is not None and not self.shards_path.startswith(("s3://", "/")):
            raise ValueError(f"shards_path {self.shards_path!r} must be an absolute path or s3://bucket/prefix")
        return self

    def _check_optimizer_state(self) -> None:
        if self.optimizer_state == "device":
            return
        if self.optimizer != "adamw":
            raise ValueError(
                f"optimizer_state {self.optimizer_state!r} is for the averages of AdamW, and optimizer is"
                f" {self.optimizer!r}: use optimizer 'adamw', or optimizer_state 'device'"
            )
        if self.ranks > 1:
            raise ValueError(
                f"optimizer_state {self.optimizer_state!r} needs one rank, and ranks is {self.ranks}: each of several ranks holds"
                " only its part of the state; use optimizer_state 'device'"
            )

    def _check_advantage(self) -> None:
        if self.advantage is not None and ":" not in self.advantage and self.advantage not in ADVANTAGE_DEFAULTS:
            raise ValueError(
                f"unknown advantage {self.advantage!r}: use one of {', '.join(ADVANTAGE_DEFAULTS)}, or your own as "
                f"package.module:function{did_you_mean(self.advantage, ADVANTAGE_DEFAULTS)}"
            )
        found = self.recipe.advantage
        read = ADVANTAGE_DEFAULTS.get(found, {})
        settings = sorted({name for reads in ADVANTAGE_DEFAULTS.values() for name in reads})
        unread = [name for name in settings if getattr(self, name) is not None and name not in read]
        if unread:
            raise ValueError(f"advantage {found!r} does not read {', '.join(unread)}: remove it")

    def _check_distillation(self) -> None:
        unread = ["distill_until"] if self.distill_until is not None else []
        unread += ["distill_kl"] if self.distill_kl != "sampled" else []
        if unread and self.distill_coef is None and not self.recipe.distill_coef:
            raise ValueError(
                f"{' and '.join(unread)} cannot be used: the divergence from a teacher has no weight. Set distill_coef (0: "
                "deliberately off), or loss = 'distill'"
            )

    def _check_loss(self) -> None:
        if ":" in self.loss:
            if self.advantage is None or self.reduction is None:
                raise ValueError("your own loss has no default advantage and reduction: set both")
        elif self.loss not in LOSS_DEFAULTS:
            raise ValueError(
                f"unknown loss {self.loss!r}: use one of {', '.join(LOSS_DEFAULTS)}, or your own as package.module:function"
                f"{did_you_mean(self.loss, LOSS_DEFAULTS)}"
            )
        else:
            unread = sorted(name for name in self._loss_settings() if name not in LOSS_DEFAULTS[self.loss])
            if unread:
                raise ValueError(f"loss {self.loss!r} does not read {', '.join(unread)}: remove it")
            if self.loss == "decoupled" and self.old_logprobs == "engine":
                raise ValueError(
                    "loss 'decoupled' weights by old / sampled, which is always 1 with old_logprobs = 'engine': use 'snapshot'"
                )
        if (self.recipe.reduction == "fixed_length") != (self.reduction_length is not None):
            if self.reduction_length is not None:
                raise ValueError(
                    f"reduction_length is read by reduction 'fixed_length' only: {self._reduction()}; remove it"
                )
            raise ValueError(
                f"reduction_length is missing: {self._reduction()}, which divides by it; set it to a number of tokens"
            )

    def _reduction(self) -> str:
        """The reduction and where it comes from, for errors."""
        if self.reduction is not None:
            return f"reduction is {self.reduction!r}"
        return f"loss {self.loss!r} has reduction {self.recipe.reduction!r} by default"

    def _loss_settings(self) -> set[str]:
        """The loss-specific settings that were set."""
        return {name for name in LOSS_NUMBERS if getattr(self, name) is not None} | (
            {"loss_options"} if self.loss_options else set()
        )

    def _check_correction(self) -> None:
        if self.kl_estimator is not None and self.kl_coef == 0:
            raise ValueError("kl_estimator needs a KL penalty: set trainer.kl_coef")
        if self.correction_low is not None and self.correction != "mis":
            raise ValueError(f"correction {self.correction!r} does not read correction_low: only 'mis' does")
        if self.correction == "none":
            if self.correction_level is not None or self.correction_bound is not None:
                raise ValueError("correction_level and correction_bound need a correction: set trainer.correction")
            return
        if self.old_logprobs == "engine":
            raise ValueError(
                "old_logprobs = 'engine' already takes the ratio against the sampling policy: a correction would apply it twice"
            )
        if self.loss == "decoupled":
            raise ValueError("loss 'decoupled' already weights by old / sampled: a correction would apply it twice")

    @property
    def recipe(self) -> Recipe:
        """The effective settings: defaults of the loss where nothing else was set."""
        defaults: dict[str, Any] = LOSS_DEFAULTS.get(self.loss, {})
        advantage = self.advantage or defaults.get("advantage", "group")
        of_advantage = ADVANTAGE_DEFAULTS.get(advantage, {})
        return Recipe(
            loss=self.loss,
            old_logprobs=self.old_logprobs or self._default_old_logprobs(),
            **{name: defaults.get(name) if (own := getattr(self, name)) is None else own for name in LOSS_NUMBERS},
            loss_options=self.loss_options,
            advantage=advantage,
            turn_discount=self.turn_discount or of_advantage.get("turn_discount"),
            distill_coef=defaults.get("distill_coef", 0.0) if self.distill_coef is None else self.distill_coef,
            distill_kl=self.distill_kl,
            gigpo_weight=self.gigpo_weight if self.gigpo_weight is not None else of_advantage.get("gigpo_weight"),
            reduction=self.reduction or defaults.get("reduction", "token_mean"),
            correction_level="sequence_mean"
            if self.correction_level == "sequence"
            else self.correction_level or "token",
            correction_bound=self.correction_bound or 2.0,
            correction_low=self.correction_low,
            kl_estimator=self.kl_estimator or ("k2" if self.kl_coef else None),
            overlong_buffer=self.overlong_buffer or -(-(self.overlong_tokens or 0) // 2),
            overlong_penalty=self.overlong_penalty or 1.0,
        )

    def _default_old_logprobs(self) -> str:
        # A correction weights by old / sampled, so its ratio is taken to the start of the step.
        return (
            "snapshot"
            if self.correction != "none"
            else LOSS_DEFAULTS.get(self.loss, {}).get("old_logprobs", "snapshot")
        )

    @property
    def is_sharded(self) -> bool:
        """Whether checkpoints have shards."""
        return self.ranks > 1 or self.shards_path is not None

    def with_own_shards(self, run_id: str) -> Self:
        """Runs may share a directory or a bucket for shards: each has its own folder in it."""
        if self.shards_path is None:
            return self
        return self.model_copy(update={"shards_path": f"{self.shards_path.rstrip('/')}/{run_id}"})

    @property
    def logits_bytes(self) -> int:
        # Each chunk adds its gradient to that of all output embeddings: few large chunks cost a GPU less memory traffic.
        return (self.max_logits_mb or (2048 if self.device == "cuda" else 256)) << 20

    @property
    def tokens_per_pass(self) -> int:
        return self.max_tokens_per_microbatch or DEFAULT_TOKENS_PER_PASS

    @property
    def wants_exact_passes(self) -> bool:
        """Whether passes have the bits of the sampler, if the model can."""
        settings = self.model_dump(include={"device", "compute_dtype", "exactness"})
        return effective_exactness(settings) == "bitwise"

    def numeric_settings(self) -> dict[str, Any]:
        """The settings that decide the numbers of a step, as JSON values. They must not change before steps that are replayed."""
        settings = self.model_dump(mode="json", exclude=set(NOT_NUMERIC))
        if self.optimizer_state == "host":
            settings["optimizer_state"] = "device"  # the same numbers
        settings |= {name: value for name, value in self.recipe.as_settings().items() if settings.get(name) is None}
        # A default estimator is replaced by the advantages of the producer, a named one is not.
        settings["advantage"] = self.advantage
        settings["exactness"] = effective_exactness(settings)
        if self.schedule != "constant":
            settings["max_steps"] = self.max_steps
        return settings
