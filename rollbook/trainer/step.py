"""One training step: a batch in, an updated model and metrics out. Deterministic to the bit on a CPU with a fixed thread count.

With `old_logprobs = "engine"` the ratio is taken against the policy that sampled the tokens, whose logprobs came with them. The
logprobs at the start of the step are then needed for metrics only, and computed for one pass of the last minibatch.

With `snapshot` it is taken against pi_old, the policy at the start of the step. Until the first optimizer step of a batch that is
the current policy, so the first minibatch uses its own detached log-probabilities: the ratio is exactly 1, and one minibatch per
step needs no second pass. For the other minibatches pi_old is computed before the first optimizer step.
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rollbook.contracts.batch import TrainingBatch
from rollbook.contracts.errors import RunError
from rollbook.contracts.weights import AdapterKind
from rollbook.telemetry.token_records import Key, TokenArrays
from rollbook.trainer.config import Recipe, TrainerConfig
from rollbook.trainer.data.minibatches import (
    Microbatch,
    Minibatch,
    PlanSettings,
    TrainRow,
    check_vocabulary,
    flatten,
    plan_minibatch,
    plan_rows,
)
from rollbook.trainer.distributed.sharding import Passes, Ranks, cpu_mesh, gathered, own_shards, shard_state
from rollbook.trainer.files.random_states import random_states
from rollbook.trainer.flops import training_flops
from rollbook.trainer.losses.corrections import correction, k3_divergence, kl_penalty
from rollbook.trainer.losses.inputs import LossInputs, LossSettings
from rollbook.trainer.losses.registry import loss_named
from rollbook.trainer.losses.statistics import TokenStatistics
from rollbook.trainer.model.policy_model import PolicyModel
from rollbook.trainer.model.weights import snapshot_of
from rollbook.trainer.optimizer import GradientGuard, clip_large_gradient, learning_rate, peak_rate

MIN_SAMPLED_LOGPROB = -20.0
"""Less likely tokens are sampled about once in 500 million."""
OPTIMIZER_SETTINGS = ("lr", "betas", "eps", "weight_decay")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """The result of training one batch."""

    step: int
    optimizer_steps: int
    skipped_steps: int
    """Minibatches without an optimizer step: their gradient was not finite, or its norm was above the limit."""
    num_tokens: int
    """Trained tokens."""
    flops: float = 0.0
    """Floating-point operations of the batch, without padding and recomputation."""
    metrics: dict[str, float | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerSnapshot:
    """Copies of everything a checkpoint holds, at one step. Training does not change them."""

    step: int
    model: PolicyModel
    """Writes `weights` in its format. Its own weights are not read."""
    weights: Mapping[str, Tensor]
    state: dict[str, Any]
    """State of the optimizer, the random generators and the gradient guard."""
    shards: Mapping[str, Tensor] | None = None
    """This rank's part of the weights and of the optimizer's tensors, which `state` then does not hold; None: not sharded."""


@dataclass(slots=True)
class _Tally:
    """Sums over the minibatches of one step."""

    statistics: TokenStatistics = field(default_factory=TokenStatistics)
    loss: float = 0.0
    grad_norms: list[float] = field(default_factory=list)
    skipped: int = 0
    is_last: bool = True
    """The minibatch that is trained is the last one of the step."""


class TrainStep:
    """The model with its optimizer. `step` counts the batches it was trained on."""

    def __init__(
        self,
        model: PolicyModel,
        config: TrainerConfig,
        *,
        step: int = 0,
        reference: PolicyModel | None = None,
    ) -> None:
        self.model = model
        self.step = step
        self.ranks = Ranks.here(config.ranks)
        self._cpu_mesh = cpu_mesh() if self.ranks.size > 1 else None
        self.guard = GradientGuard(max_in_a_row=config.max_skipped_steps, max_norm=config.skip_grad_norm_above)
        self._config = config.model_copy(update={"max_tokens_per_microbatch": model.tokens_per_pass(config)})
        self._peak_rate = peak_rate(config, width=model.shape.width)
        self._recipe = config.recipe
        self._reference = reference
        self._loss = loss_named(config.loss)
        self._settings = loss_settings(self._recipe)
        matrices = [p for p in model.parameters() if p.requires_grad and p.ndim > 1]
        vectors = [p for p in model.parameters() if p.requires_grad and p.ndim <= 1]
        self.trained = matrices + vectors
        """In the order of the optimizer's state."""
        self.optimizer = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": config.weight_decay},
                {"params": vectors, "weight_decay": 0.0},
            ],
            lr=self._peak_rate,
            betas=config.betas,
            eps=config.eps,
            fused=True,
        )

    def load_optimizer(self, state: dict[str, Any]) -> None:
        """Load the running means of a checkpoint. Rates and decays stay those of the settings, which may have changed since."""
        ours = [{key: group[key] for key in OPTIMIZER_SETTINGS} for group in self.optimizer.param_groups]
        spread = shard_state(state["state"], [p for group in self.optimizer.param_groups for p in group["params"]])
        self.optimizer.load_state_dict({**state, "state": spread})
        for group, settings in zip(self.optimizer.param_groups, ours, strict=True):
            group.update(settings)

    @property
    def plan_settings(self) -> PlanSettings:
        return PlanSettings(
            config=self._config, is_packed=self.model.is_packed, vocabulary_size=self.model.vocabulary_size
        )

    @property
    def num_parameters(self) -> int:
        return self.model.num_parameters

    @property
    def vocabulary_size(self) -> int:
        return self.model.vocabulary_size

    def snapshot(self) -> dict[str, Tensor]:
        """A copy of the weights. Training does not change it."""
        return self.model.snapshot()

    def publish_adapters(self) -> AdapterKind:
        """From now on, snapshots hold the adapters only."""
        return self.model.publish_adapters()

    def close(self) -> None:
        """Nothing to close; a `Team` has processes."""

    def state_snapshot(self, weights: Mapping[str, Tensor]) -> LearnerSnapshot:
        """A copy of everything the next step depends on, with the copy of the weights that `snapshot` made."""
        optimizer: dict[str, Any] = self.optimizer.state_dict()
        shards = None
        if self._config.is_sharded:
            named = {f"model.{name}": weight for name, weight in self.model.checkpointed_weights().items()}
            for number, held in optimizer["state"].items():
                named |= {f"optimizer.{number}.{name}": value for name, value in held.items()}
            shards = own_shards(named, self._cpu_mesh)
            optimizer = {"param_groups": optimizer["param_groups"]}
        state = {
            "optimizer": snapshot_of(optimizer),
            "random": random_states(),
            "skipped_in_a_row": self.guard.skipped_in_a_row,
        }
        return LearnerSnapshot(
            step=self.step,
            model=self.model,
            weights=self.model.checkpoint_weights(weights),
            state=state,
            shards=shards,
        )

    def run(self, batch: TrainingBatch) -> StepReport:
        """Train the batch of the next step. Blocks: call it in a thread."""
        return self.train(self.plan_batch(batch), step=batch.step)

    def plan_batch(self, batch: TrainingBatch) -> list[Minibatch]:
        """Split a batch into passes."""
        return self.plan_rows(flatten(batch, self._config), step=batch.step)

    def train_rows(self, rows: Sequence[TrainRow], *, step: int) -> StepReport:
        """Train these rows as step `step`."""
        return self.train(self.plan_rows(rows, step=step), step=step)

    def train(self, minibatches: Sequence[Minibatch], *, step: int) -> StepReport:
        """Train the passes of this rank, and report about all of them."""
        if step != self.step + 1:
            raise RunError(f"the model is at step {self.step} and received batch {step}; batches are trained in order")
        tally = self.train_passes([self.ranks.own_passes(part.microbatches) for part in minibatches], step=step)
        return self._report(step, minibatches, tally)

    def train_passes(self, minibatches: Sequence[Passes], *, step: int) -> _Tally:
        """Train the passes of one rank, for each minibatch of step `step`. All ranks must call it."""
        # Set in the computing thread: other threads do not inherit it, and it decides the last bits of sums.
        torch.set_num_threads(self._config.threads)
        rate = learning_rate(self._config, step, peak=self._peak_rate)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        tally = _Tally()
        try:
            for passes, old in zip(minibatches, self._old_logprobs(minibatches), strict=True):
                tally.is_last = passes is minibatches[-1]
                self._train_minibatch(passes, old, tally, step=step)
        except torch.OutOfMemoryError as error:
            tokens = self._config.tokens_per_pass
            raise RunError(
                f"step {step} does not fit into the memory of {self.model.device}, with up to {tokens} tokens a pass. Set"
                f" trainer.max_tokens_per_microbatch = {max(1, tokens // 2)}, or give a policy server on the same device less"
                f" (inference.kv_memory_mb), and start the run again: it resumes. {error}"
            ) from error
        tally.statistics.sum_over(self.ranks, self.model.device)
        self.step = step
        return tally

    def plan_rows(self, rows: Sequence[TrainRow], *, step: int) -> list[Minibatch]:
        """Split rows into passes."""
        return plan_rows(rows, self.plan_settings, step=step)

    def mean_logprob(self, rows: Sequence[TrainRow]) -> float:
        """Mean log-probability of the rows' trained tokens under the current weights, without training."""
        torch.set_num_threads(self._config.threads)
        minibatch = plan_minibatch(rows, self._config, is_packed=self.model.is_packed)
        total = torch.zeros((), dtype=torch.float64)
        with torch.no_grad():
            for micro in minibatch.microbatches:
                total += self.model.token_logprobs(micro)[0].double().sum().cpu()
        return float(total) / minibatch.num_trained

    def gain(self, rows: Sequence[TrainRow]) -> float | None:
        """Mean over trained tokens of A (log pi - log mu): how much the current weights prefer samples with higher rewards.

        To first order, this policy's reward exceeds the sampler's by this much, in units of advantage. None where no token has a
        sampling logprob.
        """
        torch.set_num_threads(self._config.threads)
        total, count = 0.0, 0
        with torch.no_grad():
            for micro in plan_minibatch(rows, self._config, is_packed=self.model.is_packed).microbatches:
                current = self.model.token_logprobs(micro)[0].double().cpu().numpy()
                moved = micro.advantages_N * (current - micro.sampled_logprobs_N)
                total += float(np.nansum(moved))
                count += int(np.isfinite(moved).sum())
        return total / count if count else None

    def token_values(self, batch: TrainingBatch) -> dict[Key, TokenArrays]:
        """Logprob and entropy under the current weights, and advantage, of the trained tokens of a batch. Does not train.

        Empty with several ranks, which compute only together.
        """
        rows = flatten(batch, self._config)
        if self.ranks.size > 1 or not rows:
            return {}
        torch.set_num_threads(self._config.threads)
        check_vocabulary(rows, self.vocabulary_size, step=batch.step)
        found: dict[Key, TokenArrays] = {}
        with torch.no_grad():
            for micro in plan_minibatch(rows, self._config, is_packed=self.model.is_packed).microbatches:
                values = [tensor.float().cpu().numpy() for tensor in self.model.token_logprobs(micro)]
                ends = np.cumsum([rows[member].num_trained for member in micro.members])
                for member, logprobs, entropies, advantages in zip(
                    micro.members,
                    *(np.split(array, ends[:-1]) for array in (*values, micro.advantages_N)),
                    strict=True,
                ):
                    row = rows[member]
                    at = row.predicted_at + 1
                    arrays = np.full((3, row.num_tokens), np.nan, dtype=np.float32)
                    arrays[:, at] = logprobs, entropies, advantages
                    found[row.group_id, *row.place] = TokenArrays.of(*arrays)
        return found

    def _old_logprobs(self, minibatches: Sequence[Passes]) -> list[list[Tensor] | None]:
        """Log-probabilities at the start of the step, by minibatch and pass. None for the first minibatch, which uses its own.

        Where the loss does not need them, only those of the first pass of the last minibatch.
        """
        is_needed = self._recipe.old_logprobs == "snapshot" or self._config.missing_logprobs == "recompute"
        needed = [later if is_needed else later[:1] if later is minibatches[-1] else [] for later in minibatches[1:]]
        with torch.no_grad():
            computed = [[self.model.token_logprobs(micro)[0] for micro, _ in passes] for passes in needed]
        return [None, *computed] if minibatches else []

    def _train_minibatch(self, passes: Passes, old: list[Tensor] | None, tally: _Tally, *, step: int) -> None:
        """One optimizer step."""
        self.optimizer.zero_grad(set_to_none=True)
        losses: list[Tensor] = []
        for number, (micro, counts) in enumerate(passes):
            current, entropy = self.model.token_logprobs(micro, is_entropy_trained=self._config.entropy_bonus > 0)
            starting = current.detach() if old is None else old[number] if number < len(old) else None
            reduced = self._loss_of(micro, current, starting, entropy, tally if counts else None)
            # Gradients are averaged over ranks, but the token weights are already fractions of the whole minibatch.
            (reduced * self.ranks.size).backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
            losses.append(reduced.detach().double())
        gradients = [parameter.grad for parameter in self.trained if parameter.grad is not None]
        total_norm = torch.nn.utils.get_total_norm(gradients, foreach=True)
        # A norm that overflows would set the gradient to 0.
        known_norm = torch.where(total_norm.isinf(), torch.zeros_like(total_norm), total_norm)
        torch.nn.utils.clip_grads_with_norm_(self.trained, self._config.max_grad_norm, known_norm, foreach=True)
        total = self.ranks.sum(torch.stack(losses).sum())
        # The only place in a step where Python waits for the device.
        norm, loss = torch.stack([gathered(total_norm).double(), total]).tolist()
        if math.isinf(norm):
            norm = clip_large_gradient(gradients, self._config.max_grad_norm)
        if self.guard.allows(norm=norm, loss=loss, step=step):
            self.optimizer.step()
            self.model.update_shadow()
            tally.loss += loss
            tally.grad_norms.append(norm)
        else:
            tally.skipped += 1
        self.optimizer.zero_grad(set_to_none=True)

    def _loss_of(
        self, micro: Microbatch, current: Tensor, starting: Tensor | None, entropy: Tensor, tally: _Tally | None
    ) -> Tensor:
        """The weighted sum of the token losses of one pass. Adds its statistics to the tally.

        `starting`: None if the loss does not need the log-probabilities at the start of the step.
        """
        old = current.detach() if starting is None else starting
        inputs, is_known = self._loss_inputs(micro, current, old)
        terms = self._loss(inputs, self._settings)
        loss_N = terms.loss_N
        corrected = reference_kl = None
        if self._config.correction != "none":
            corrected = correction(
                inputs,
                old,
                kind=self._config.correction,
                level=self._recipe.correction_level,
                bound=self._recipe.correction_bound,
                low=self._recipe.correction_low or 0.0,
            )
            loss_N = loss_N * corrected.weights_N
        if self._config.kl_coef > 0:
            reference = self._reference_logprobs(micro)
            penalty_N = kl_penalty(inputs, reference, estimator=self._recipe.kl_estimator or "k2")
            loss_N = loss_N + self._config.kl_coef * penalty_N
            reference_kl = k3_divergence(current.detach(), reference)
        if self._config.entropy_bonus > 0:
            loss_N = loss_N - self._config.entropy_bonus * entropy
        if tally is not None:
            tally.statistics.add(
                inputs,
                terms,
                starting_N=starting,
                measures_drift=tally.is_last,
                lags_N=None if micro.lags_N is None else self.model.tensor(micro.lags_N),
                entropy_N=entropy.detach(),
                is_known_N=is_known,
                correction=corrected,
                reference_kl_N=reference_kl,
            )
        return (loss_N * self.model.tensor(micro.weights_N)).sum()

    @torch.no_grad()
    def _reference_logprobs(self, micro: Microbatch) -> Tensor:
        """Log-probabilities under the reference policy: those that the producer sent, else of the initial policy (a frozen copy, or
        the model with its adapters disabled)."""
        given = None if micro.reference_logprobs_N is None else self.model.tensor(micro.reference_logprobs_N)
        if given is not None and not bool(torch.isnan(given).any()):
            return given
        model = self._reference or self.model
        with self.model.adapters_off() if self._reference is None else nullcontext():
            computed = model.token_logprobs(micro)[0]
        return computed if given is None else torch.where(torch.isnan(given), computed, given)

    def _loss_inputs(self, micro: Microbatch, current: Tensor, starting: Tensor) -> tuple[LossInputs, Tensor]:
        tensor = self.model.tensor
        # A recorded logprob far below those of sampled tokens would make ratios infinite, and gradients NaN.
        recorded = tensor(micro.sampled_logprobs_N).clamp(min=MIN_SAMPLED_LOGPROB)
        is_known = ~torch.isnan(recorded)
        sampled = torch.where(is_known, recorded, starting)
        inputs = LossInputs(
            current_N=current,
            old_N=sampled if self._recipe.old_logprobs == "engine" else starting,
            sampled_N=sampled,
            advantages_N=tensor(micro.advantages_N),
            row_of_N=tensor(micro.row_of_N),
            num_rows=micro.num_rows,
        )
        return inputs, is_known

    def _report(self, step: int, minibatches: Sequence[Minibatch], tally: _Tally) -> StepReport:
        taken = len(tally.grad_norms)
        num_tokens = sum(minibatch.num_trained for minibatch in minibatches)
        passes = [micro for minibatch in minibatches for micro in minibatch.microbatches]
        computed = sum(micro.inputs_BT.size for micro in passes)
        padding = sum(micro.num_padding for micro in passes)
        shared = sum(micro.num_shared for micro in passes)
        metrics = {
            **tally.statistics.metrics(),
            "train/loss": tally.loss / taken if taken else None,
            "train/grad_norm": sum(tally.grad_norms) / taken if taken else None,
            "train/lr": learning_rate(self._config, step, peak=self._peak_rate),
            "train/optimizer_steps": taken,
            "train/skipped_steps": tally.skipped,
            "train/tokens": num_tokens,
            "train/sequences": sum(minibatch.num_rows for minibatch in minibatches),
            "train/passes": len(passes),
            "train/computed_tokens": computed,
            "train/padding_share": padding / computed if computed else None,
            "train/shared_token_share": shared / (shared + computed - padding) if computed else None,
        }
        return StepReport(
            step=step,
            optimizer_steps=taken,
            skipped_steps=tally.skipped,
            num_tokens=num_tokens,
            flops=training_flops(passes, self.model.shape),
            metrics=metrics,
        )


def loss_settings(recipe: Recipe) -> LossSettings:
    """The loss's settings as numbers; unset bounds keep the infinite defaults of `LossSettings`."""
    named = {
        "clip_low": recipe.clip_low,
        "clip_high": recipe.clip_high,
        "dual_clip": recipe.dual_clip,
        "dro_beta": recipe.dro_beta,
        "behaviour_cap": recipe.behaviour_cap,
    }
    return LossSettings(
        options=dict(recipe.loss_options), **{name: value for name, value in named.items() if value is not None}
    )
