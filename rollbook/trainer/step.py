"""Batch in, updated model and metrics out. Same weights, same optimizer state, same batch: same bits (on CPU, with fixed threads).

The policy at the start of the step, pi_old, is what the ratio is taken to. Until the first optimizer step of a batch it *is* the
current policy, so the first minibatch takes its own log-probabilities, detached: the ratio is exactly 1 by construction, and with
one minibatch a step no second pass is made. For the other minibatches pi_old is computed before anything moves.

With `old_logprobs = "engine"` the ratio is taken to the policy that sampled the tokens instead, whose logprobs came with them.
"""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rollbook.contracts.adapter import AdapterKind
from rollbook.contracts.batch import TrainingBatch
from rollbook.contracts.errors import RunError
from rollbook.trainer.config import TrainerConfig
from rollbook.trainer.data.minibatches import Microbatch, Minibatch, TrainRow, flatten, plan, plan_minibatch
from rollbook.trainer.distributed.ranks import Ranks
from rollbook.trainer.distributed.sharding import spread_state, whole
from rollbook.trainer.files.random_states import random_states
from rollbook.trainer.flops import training_flops
from rollbook.trainer.losses.corrections import correction
from rollbook.trainer.losses.defaults import Recipe
from rollbook.trainer.losses.inputs import LossInputs, LossSettings
from rollbook.trainer.losses.kl import k3_divergence
from rollbook.trainer.losses.registry import loss_named
from rollbook.trainer.losses.statistics import TokenStatistics
from rollbook.trainer.model.policy_model import PolicyModel
from rollbook.trainer.model.weights import tree_to_host
from rollbook.trainer.optimizer.gradient_guard import GradientGuard
from rollbook.trainer.optimizer.schedule import learning_rate

OPTIMIZER_SETTINGS = ("lr", "betas", "eps", "weight_decay")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """What one batch did to the model."""

    step: int
    optimizer_steps: int
    skipped_steps: int
    """Minibatches whose gradient was not finite, or above the limit: they changed nothing."""
    num_tokens: int
    """Trained tokens."""
    flops: float = 0.0
    """Floating-point operations that the batch asked for, padding and recomputation left out."""
    metrics: dict[str, float | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerCopy:
    """Everything a checkpoint holds, copied at one step to main memory: it stays as it is while training goes on."""

    step: int
    model: PolicyModel
    """Knows how its weights are written; they are not read from it."""
    weights: Mapping[str, Tensor]
    state: dict[str, Any]
    """Of the optimizer, the random generators and the guard."""


@dataclass(slots=True)
class _Tally:
    """What adds up over the minibatches of one step."""

    statistics: TokenStatistics = field(default_factory=TokenStatistics)
    loss: float = 0.0
    grad_norms: list[float] = field(default_factory=list)
    skipped: int = 0


class TrainStep:
    """The model with its optimizer. `step` counts the batches it has learned from."""

    def __init__(
        self,
        model: PolicyModel,
        config: TrainerConfig,
        *,
        step: int = 0,
        reference: PolicyModel | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        self.model = model
        self.step = step
        self.ranks = ranks or Ranks.here(config.ranks)
        self.guard = GradientGuard(most_in_a_row=config.max_skipped_steps, norm_above=config.skip_grad_norm_above)
        self._config = config
        self._recipe = config.recipe
        self._reference = reference
        self._loss = loss_named(config.loss)
        self._settings = loss_settings(self._recipe)
        matrices = [p for p in model.parameters() if p.requires_grad and p.ndim > 1]
        vectors = [p for p in model.parameters() if p.requires_grad and p.ndim <= 1]
        self._trained = matrices + vectors
        self.optimizer = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": config.weight_decay},
                {"params": vectors, "weight_decay": 0.0},
            ],
            lr=config.lr,
            betas=config.betas,
            eps=config.eps,
            fused=True,
        )

    def load_optimizer(self, state: dict[str, Any]) -> None:
        """Running means from a checkpoint; rates and decays stay those of the settings, which may have changed since."""
        ours = [{key: group[key] for key in OPTIMIZER_SETTINGS} for group in self.optimizer.param_groups]
        spread = spread_state(state["state"], [p for group in self.optimizer.param_groups for p in group["params"]])
        self.optimizer.load_state_dict({**state, "state": spread})
        for group, settings in zip(self.optimizer.param_groups, ours, strict=True):
            group.update(settings)

    @property
    def num_parameters(self) -> int:
        return self.model.num_parameters

    def snapshot(self) -> dict[str, Tensor]:
        """A copy of the weights that stays as it is while training goes on."""
        return self.model.snapshot()

    def publish_adapters(self) -> AdapterKind:
        """From now on snapshots are of the adapters alone."""
        return self.model.publish_adapters()

    def close(self) -> None:
        """Nothing to let go: a team has."""

    def copied(self, weights: Mapping[str, Tensor]) -> LearnerCopy:
        """A copy of everything that the next step depends on; of the weights it was made already."""
        state = {
            "optimizer": tree_to_host(self.optimizer.state_dict()),
            "random": random_states(),
            "skipped_in_a_row": self.guard.skipped_in_a_row,
        }
        return LearnerCopy(step=self.step, model=self.model, weights=self.model.saved_weights(weights), state=state)

    def run(self, batch: TrainingBatch) -> StepReport:
        """Learn from the batch of the next step. Blocks for as long as it takes: call it in a thread."""
        return self.learn(flatten(batch, self._config), step=batch.step)

    def learn(self, rows: Sequence[TrainRow], *, step: int) -> StepReport:
        """Learn from rows wherever they come from, as step `step`."""
        if step != self.step + 1:
            raise RunError(
                f"the model has learned from {self.step} batches and was given batch {step}; batches go in order"
            )
        # In the thread that computes: the setting is not inherited everywhere, and it decides the last bits of sums.
        torch.set_num_threads(self._config.threads)
        self._refuse_unusable(rows, step)
        rate = learning_rate(self._config, step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        minibatches = plan(rows, self._config, step=step, is_packed=self.model.is_packed)
        tally = _Tally()
        for minibatch, old in zip(minibatches, self._old_logprobs(minibatches), strict=True):
            self._learn(minibatch, old, tally, step=step)
        self.step = step
        return self._report(step, rate, minibatches, tally)

    def mean_logprob(self, rows: Sequence[TrainRow]) -> float:
        """Mean log-probability of the rows' trained tokens under the current weights. Nothing is learned from them."""
        torch.set_num_threads(self._config.threads)
        minibatch = plan_minibatch(rows, self._config, is_packed=self.model.is_packed)
        total = torch.zeros((), dtype=torch.float64)
        with torch.no_grad():
            for micro in minibatch.microbatches:
                total += self.model.token_logprobs(micro)[0].double().sum().cpu()
        return float(total) / minibatch.num_trained

    def gain(self, rows: Sequence[TrainRow]) -> float | None:
        """How much the current weights prefer what earned more: the mean over trained tokens of A (log pi - log mu).

        To first order it is how much better than the sampler's this policy's reward is, in units of advantage. None where no
        token says with which log-probability it was sampled.
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

    def _old_logprobs(self, minibatches: Sequence[Minibatch]) -> list[list[Tensor] | None]:
        """Log-probabilities at the start of the step, of every minibatch but the first (which computes its own as it learns)."""
        if self._config.old_logprobs == "engine":
            return [None for _ in minibatches]
        old: list[list[Tensor] | None] = [None for _ in minibatches[:1]]
        with torch.no_grad():
            old.extend(
                [self.model.token_logprobs(micro)[0] for micro, _ in self.ranks.own_passes(later.microbatches)]
                for later in minibatches[1:]
            )
        return old

    def _learn(self, minibatch: Minibatch, old: list[Tensor] | None, tally: _Tally, *, step: int) -> None:
        """One optimizer step."""
        self.optimizer.zero_grad(set_to_none=True)
        losses: list[Tensor] = []
        for number, (micro, counts) in enumerate(self.ranks.own_passes(minibatch.microbatches)):
            current, entropy = self.model.token_logprobs(micro, is_entropy_trained=self._config.entropy_bonus > 0)
            starting = current.detach() if old is None else old[number]
            reduced = self._loss_of(micro, current, starting, entropy, tally if counts else None)
            # Gradients are averaged over ranks, and the weights of tokens say already what part of the minibatch each is.
            (reduced * self.ranks.size).backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
            losses.append(reduced.detach().double())
        clipped_norm = torch.nn.utils.clip_grad_norm_(self._trained, self._config.max_grad_norm, foreach=True)
        total = self.ranks.sum(torch.stack(losses).sum())
        # The one moment at which Python waits for the device.
        norm, loss = torch.stack([whole(clipped_norm).double(), total]).tolist()
        if self.guard.lets_pass(norm=norm, loss=loss, step=step):
            self.optimizer.step()
            self.model.weights_moved()
            tally.loss += loss
            tally.grad_norms.append(norm)
        else:
            tally.skipped += 1
        self.optimizer.zero_grad(set_to_none=True)

    def _loss_of(
        self, micro: Microbatch, current: Tensor, starting: Tensor, entropy: Tensor, tally: _Tally | None
    ) -> Tensor:
        """The weighted sum of the token losses of one pass; what is told of them goes into the tally."""
        inputs, is_known = self._loss_inputs(micro, current, starting)
        terms = self._loss(inputs, self._settings)
        loss_N = terms.loss_N
        corrected = reference_kl = None
        if self._config.correction != "none":
            corrected = correction(
                inputs,
                starting,
                kind=self._config.correction,
                is_sequence_level=self._recipe.correction_level == "sequence",
                bound=self._recipe.correction_bound,
            )
            loss_N = loss_N * corrected.weights_N
        if self._config.kl_coef > 0:
            reference_kl = k3_divergence(current, self._reference_logprobs(micro))
            loss_N = loss_N + self._config.kl_coef * reference_kl
        if self._config.entropy_bonus > 0:
            loss_N = loss_N - self._config.entropy_bonus * entropy
        if tally is not None:
            tally.statistics.add(
                inputs,
                terms,
                starting_N=starting,
                entropy_N=entropy.detach(),
                is_known_N=is_known,
                correction=corrected,
                reference_kl_N=reference_kl,
            )
        return (loss_N * self.model.tensor(micro.weights_N)).sum()

    @torch.no_grad()
    def _reference_logprobs(self, micro: Microbatch) -> Tensor:
        """Under the initial policy: a frozen copy, or the model without its adapters."""
        model = self._reference or self.model
        with self.model.adapters_off() if self._reference is None else nullcontext():
            return model.token_logprobs(micro)[0]

    def _loss_inputs(self, micro: Microbatch, current: Tensor, starting: Tensor) -> tuple[LossInputs, Tensor]:
        tensor = self.model.tensor
        told = tensor(micro.sampled_logprobs_N)
        is_known = ~torch.isnan(told)
        sampled = torch.where(is_known, told, starting)
        inputs = LossInputs(
            current_N=current,
            old_N=sampled if self._config.old_logprobs == "engine" else starting,
            sampled_N=sampled,
            advantages_N=tensor(micro.advantages_N),
            row_of_N=tensor(micro.row_of_N),
            num_rows=micro.num_rows,
        )
        return inputs, is_known

    def _refuse_unusable(self, rows: Sequence[TrainRow], step: int) -> None:
        """Faults that a person must see, before anything is computed from them."""
        vocabulary = self.model.vocabulary_size
        for row in rows:
            if row.temperature <= 0:
                raise RunError(
                    f"batch {step}: group {row.group_id} was sampled greedily (temperature 0), so there is no sampling distribution"
                    " to learn from. Set a temperature above 0 for training rollouts."
                )
            highest = max(int(row.inputs.max(initial=0)), int(row.targets.max(initial=0)))
            if highest >= vocabulary:
                raise RunError(
                    f"batch {step}: group {row.group_id} has token id {highest}, but the model knows {vocabulary} tokens."
                    " Rollout and trainer must use the same model and tokenizer."
                )
            if self._config.missing_logprobs == "refuse" and np.isnan(row.sampled_logprobs).any():
                raise RunError(
                    f"batch {step}: group {row.group_id} has trained tokens without sampling logprobs."
                    " Have the producer record them, or set trainer.missing_logprobs = 'recompute'."
                )

    def _report(self, step: int, rate: float, minibatches: Sequence[Minibatch], tally: _Tally) -> StepReport:
        taken = len(tally.grad_norms)
        num_tokens = sum(minibatch.num_trained for minibatch in minibatches)
        passes = [micro for minibatch in minibatches for micro in minibatch.microbatches]
        computed = sum(micro.inputs_BT.size for micro in passes)
        padding = sum(micro.num_padding for micro in passes)
        tally.statistics.sum_over(self.ranks, self.model.device)
        metrics = {
            **tally.statistics.metrics(),
            "train/loss": tally.loss / taken if taken else None,
            "train/grad_norm": sum(tally.grad_norms) / taken if taken else None,
            "train/lr": rate,
            "train/optimizer_steps": taken,
            "train/skipped_steps": tally.skipped,
            "train/tokens": num_tokens,
            "train/sequences": sum(minibatch.num_rows for minibatch in minibatches),
            "train/passes": len(passes),
            "train/computed_tokens": computed,
            "train/padding_share": padding / computed if computed else None,
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
    """What the loss is told: numbers only, endless ones where there is no bound."""
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
