"""One training step: a batch in, an updated model and metrics out. Deterministic to the bit on a CPU with a fixed thread count.

With `old_logprobs = "engine"` the ratio is taken against the policy that sampled the tokens, whose logprobs came with them. The
logprobs at the start of the step are then needed for metrics only, and computed for one pass of the last minibatch.

With `snapshot` it is taken against pi_old, the policy at the start of the step. Until the first optimizer step of a batch that is
the current policy, so the first minibatch uses its own detached log-probabilities: the ratio is exactly 1, and one minibatch per
step needs no second pass. For the other minibatches pi_old is computed before the first optimizer step.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rollbook.contracts.batch import PassSplit, TrainingBatch
from rollbook.contracts.errors import RunError, is_out_of_memory
from rollbook.contracts.weights import AdapterKind
from rollbook.numerics.device_memory import release_memory
from rollbook.telemetry.token_records import Key, TokenArrays
from rollbook.trainer.config import TrainerConfig
from rollbook.trainer.data.minibatches import Minibatch, PlanSettings, plan_minibatch, plan_rows
from rollbook.trainer.data.passes import Microbatch
from rollbook.trainer.data.probe import probe_pass
from rollbook.trainer.data.rows import TrainRow, check_vocabulary, flatten
from rollbook.trainer.distributed.sharding import Passes, Ranks, cpu_mesh, gathered, own_shards, shard_state
from rollbook.trainer.exactness import LogprobComparison
from rollbook.trainer.files.random_states import random_states, set_random_states
from rollbook.trainer.losses.pass_loss import PassLoss
from rollbook.trainer.memory_errors import PassMemoryError, StepMemoryError, step_error, trial_error
from rollbook.trainer.model.flops import training_flops
from rollbook.trainer.model.policy_model import PolicyModel
from rollbook.trainer.model.weights import snapshot_of
from rollbook.trainer.optimizer import (
    GradientGuard,
    allocate_state,
    build_optimizer,
    clip_large_gradient,
    learning_rate,
    peak_rate,
    state_bytes,
)
from rollbook.trainer.step_report import StepReport, StepTally

FEW_TOKENS = 64
"""Of a pass that only allocates the gradients."""


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
        self.comparison = LogprobComparison(model, config)
        self.guard = GradientGuard(max_in_a_row=config.max_skipped_steps, max_norm=config.skip_grad_norm_above)
        self._config = config.model_copy(update={"max_tokens_per_microbatch": model.tokens_per_pass(config)})
        self._peak_rate = peak_rate(config, width=model.shape.width)
        self._recipe = config.recipe
        self._loss = PassLoss(model, config, reference=reference)
        self.optimizer = build_optimizer(model.module, config, rate=self._peak_rate)
        self.trained = [p for group in self.optimizer.param_groups for p in group["params"]]
        """In the order of the optimizer's state."""

    def load_optimizer(self, state: dict[str, Any]) -> None:
        """Load the running means of a checkpoint. Rates and decays stay those of the settings, which may have changed since."""
        pairs = zip(self.optimizer.param_groups, state["param_groups"], strict=True)
        groups = [{**ours, "params": saved["params"]} for ours, saved in pairs]
        self.optimizer.load_state_dict({"state": shard_state(state["state"], self.trained), "param_groups": groups})

    @property
    def plan_settings(self) -> PlanSettings:
        return PlanSettings(
            config=self._config,
            is_packed=self.model.is_packed,
            vocabulary_size=self.model.vocabulary_size,
            routes_shape=None if (replay := self.model.replay) is None else (replay.num_layers, replay.num_experts),
        )

    @property
    def num_parameters(self) -> int:
        return self.model.num_parameters

    @property
    def vocabulary_size(self) -> int:
        return self.model.vocabulary_size

    @property
    def inexact_because(self) -> str | None:
        """Why logprobs do not have the bits of the sampler; None if they do."""
        return self.model.inexact_because

    def snapshot(self, *, on_gpu: bool = False) -> Mapping[str, Tensor]:
        """A copy of the weights, in main memory or on their GPU. Training does not change it."""
        return self.model.snapshot(on_gpu=on_gpu)

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
        on_gpu = self._config.checkpoint_copy == "gpu"
        state = {
            "optimizer": snapshot_of(optimizer, on_gpu=on_gpu),
            "random": random_states(),
            "skipped_in_a_row": self.guard.skipped_in_a_row,
        }
        return LearnerSnapshot(
            step=self.step,
            model=self.model,
            weights=self.model.checkpoint_weights(weights, on_gpu=on_gpu),
            state=state,
            shards=shards,
        )

    def run(self, batch: TrainingBatch) -> StepReport:
        """Train the batch of the next step, with the split that was recorded for it. Blocks: call it in a thread."""
        return self.train(self.plan_batch(batch), step=batch.step, split=batch.split)

    def plan_batch(self, batch: TrainingBatch) -> list[Minibatch]:
        """Split a batch into passes."""
        return self.plan_rows(flatten(batch, self._config), step=batch.step, split=batch.split)

    def train_rows(self, rows: Sequence[TrainRow], *, step: int, split: PassSplit | None = None) -> StepReport:
        """Train these rows as step `step`."""
        return self.train(self.plan_rows(rows, step=step, split=split), step=step, split=split)

    def train(self, minibatches: Sequence[Minibatch], *, step: int, split: PassSplit | None = None) -> StepReport:
        """Train the passes of this rank, and report about all of them.

        `split`: that of the minibatches; None for the settings. Raises `StepMemoryError` if they do not fit into memory.
        """
        if step != self.step + 1:
            raise RunError(f"the model is at step {self.step} and received batch {step}; batches are trained in order")
        split = split or self.plan_settings.split
        own = [self.ranks.own_passes(part.microbatches) for part in minibatches]
        try:
            tally = self.train_passes(own, step=step, checkpointing=split.checkpointing, whole=minibatches)
        except PassMemoryError as error:
            failure = self.memory_error(error, minibatches, step=step, split=split)
        else:
            return StepReport(
                step=step,
                optimizer_steps=len(tally.grad_norms),
                skipped_steps=tally.skipped,
                num_tokens=sum(part.num_trained for part in minibatches) // self._config.ppo_epochs,
                flops=training_flops([one for part in minibatches for one in part.microbatches], self.model.shape),
                metrics=tally.metrics(
                    minibatches,
                    epochs=self._config.ppo_epochs,
                    rate=learning_rate(self._config, step, peak=self._peak_rate),
                    compares_bits=self.comparison.is_on,
                ),
                unequal=self.comparison.unequal_token(minibatches, tally.statistics),
            )
        raise failure

    def train_passes(
        self,
        minibatches: Sequence[Passes],
        *,
        step: int,
        checkpointing: bool | int,
        whole: Sequence[Minibatch] = (),
    ) -> StepTally:
        """Train the passes of one rank, for each minibatch of step `step`. All ranks must call it. `whole`: those of all ranks.

        Raises `PassMemoryError`. Weights, optimizer and random states are then as they were, unless the error says otherwise.
        """
        # Set in the computing thread: other threads do not inherit it, and it decides the last bits of sums.
        torch.set_num_threads(self._config.threads)
        rate = learning_rate(self._config, step, peak=self._peak_rate)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.model.use_checkpointing(checkpointing)
        self._allocate_optimizer()
        states, skipped = random_states(), self.guard.skipped_in_a_row
        tally = StepTally()
        if self._failure_of(lambda: self.comparison.check_earlier(whole, tally.statistics, step=step)) is not None:
            self.comparison.free_memory()

        def train_all() -> None:
            for passes, old in zip(minibatches, self._old_logprobs(minibatches), strict=True):
                tally.is_last = passes is minibatches[-1]
                self._train_minibatch(passes, old, tally, step=step)

        detail = self._failure_of(train_all)
        if detail is not None:
            set_random_states(states)
            self.guard.skipped_in_a_row = skipped
            self.comparison.free_memory()
            raise PassMemoryError(detail, is_updated=tally.is_updated)
        tally.statistics.sum_over(self.ranks, self.model.device)
        self.step = step
        return tally

    def probe(self, split: PassSplit) -> None:
        """Compute a pass of this size, forward and backward, and discard it. Raises `StepMemoryError` if it does not fit."""
        try:
            self.probe_pass(split.max_tokens, checkpointing=split.checkpointing)
        except PassMemoryError as error:
            failure = self.probe_error(error, split=split)
        else:
            return
        raise failure

    def probe_pass(self, num_tokens: int, *, checkpointing: bool | int) -> None:
        """The probe of one rank. All ranks must call it. Raises `PassMemoryError`."""
        torch.set_num_threads(self._config.threads)
        self.model.use_checkpointing(checkpointing)
        states = random_states()
        self._allocate_optimizer()

        def compute() -> None:
            # Passes after the first one need memory next to the gradients.
            for size in (min(num_tokens, FEW_TOKENS), num_tokens):
                micro = probe_pass(
                    size,
                    vocabulary_size=self.vocabulary_size,
                    context=getattr(self.model.config, "max_position_embeddings", None),
                    is_packed=self.model.is_packed,
                )
                logprobs, entropy = self.model.token_logprobs(micro, is_entropy_trained=self._config.entropy_bonus > 0)
                (logprobs.mean() + self._config.entropy_bonus * entropy.mean()).backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped

        detail = self._failure_of(compute)
        self.model.discard_gradients()
        set_random_states(states)
        if detail is not None:
            raise PassMemoryError(detail)

    def probe_error(self, error: PassMemoryError, *, split: PassSplit, rank: int | None = None) -> StepMemoryError:
        """What to do about a probe that does not fit into the memory of a rank (default: this one)."""
        if error.is_optimizer:
            return self.memory_error(error, (), step=0, split=split, rank=rank)
        return trial_error(error, split=split, process=self._process(rank), can_repeat=self.ranks.size == 1)

    def _process(self, rank: int | None) -> str:
        """`rank`: None for this one."""
        number = self.ranks.rank if rank is None else rank
        process = "the trainer" if self.ranks.size == 1 else f"trainer rank {number}"
        return f"{process} ({self.model.device})"

    def memory_error(
        self,
        error: PassMemoryError,
        minibatches: Sequence[Minibatch],
        *,
        step: int,
        split: PassSplit,
        rank: int | None = None,
    ) -> StepMemoryError:
        """What to do about a step that does not fit into the memory of a rank (default: this one)."""
        return step_error(
            error,
            minibatches,
            step=step,
            split=split,
            process=self._process(rank),
            optimizer_bytes=state_bytes(self.optimizer),
            # Other ranks wait in a collective, which cannot be repeated.
            can_repeat=self.ranks.size == 1,
        )

    def _allocate_optimizer(self) -> None:
        """Allocate the running means, as the optimizer does in its first step.

        Before the first pass: what fits then, fits later; and a failure leaves no weight updated.
        """
        if self.optimizer.state:
            return
        detail = self._failure_of(partial(allocate_state, self.optimizer))
        if detail is not None:
            self.optimizer.state.clear()
            raise PassMemoryError(detail, is_optimizer=True)

    def _failure_of(self, work: Callable[[], None]) -> str | None:
        """Do the work. Returns None, or why it did not fit into memory, after freeing what it allocated."""
        try:
            work()
            return None
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            detail = str(error)
        # The traceback of the error, which is freed now, held the tensors of the failed pass.
        self.model.discard_gradients()
        release_memory()
        return detail

    def plan_rows(self, rows: Sequence[TrainRow], *, step: int, split: PassSplit | None = None) -> list[Minibatch]:
        """Split rows into passes. `split`: None for that of the settings."""
        return plan_rows(rows, self.plan_settings.with_split(split), step=step)

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

    def token_values(self, batch: TrainingBatch, split: PassSplit | None = None) -> dict[Key, TokenArrays]:
        """Logprob and entropy under the current weights, and advantage, of the trained tokens of a batch. Does not train.

        Empty with several ranks, which compute only together, and if there is no memory for it.
        """
        rows = flatten(batch, self._config)
        if self.ranks.size > 1 or not rows:
            return {}
        torch.set_num_threads(self._config.threads)
        check_vocabulary(rows, self.vocabulary_size, step=batch.step)
        found: dict[Key, TokenArrays] = {}
        config = self.plan_settings.with_split(split).config

        @torch.no_grad()
        def compute() -> None:
            for micro in plan_minibatch(rows, config, is_packed=self.model.is_packed).microbatches:
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

        return found if self._failure_of(compute) is None else {}

    def _old_logprobs(self, minibatches: Sequence[Passes]) -> list[list[Tensor] | None]:
        """Log-probabilities at the start of the step, by minibatch and pass. None for the first minibatch, which uses its own.

        Where the loss does not need them, only those of the first pass of the last minibatch.
        """
        is_needed = self._recipe.old_logprobs == "snapshot" or self._config.missing_logprobs == "recompute"
        needed = [later if is_needed else later[:1] if later is minibatches[-1] else [] for later in minibatches[1:]]
        with torch.no_grad():
            computed = [[self.model.token_logprobs(micro)[0] for micro, _ in passes] for passes in needed]
        return [None, *computed] if minibatches else []

    def _train_minibatch(self, passes: Passes, old: list[Tensor] | None, tally: StepTally, *, step: int) -> None:
        """One optimizer step."""
        self.optimizer.zero_grad(set_to_none=True)
        losses: list[Tensor] = []
        for number, (micro, counts) in enumerate(passes):
            own = self._own_routes_logprobs(micro, tally)
            current, entropy = self.model.token_logprobs(
                micro.with_observed().with_tops(), is_entropy_trained=self._config.entropy_bonus > 0
            )
            tops = None
            if micro.top_ids_NK is not None:
                current, tops = current[:, 0], current[: micro.num_trained, 1:]
            current, observed = current[: micro.num_trained], current[micro.num_trained :]
            entropy = entropy[: micro.num_trained]
            # Before the reference model or its adapters replace what the routers chose.
            balance, load = self._router_terms()
            if self.model.replay is not None:
                tally.replays.append(self.model.replay.counts(micro.inputs_BT.size - micro.num_padding))
            if own is not None:
                tally.routes_kl = [self._loss.sampler_kl(micro, logprobs) for logprobs in (own, current.detach())]
            starting = current.detach() if old is None else old[number] if number < len(old) else None
            reduced = self._loss(
                micro,
                current,
                starting,
                entropy,
                step=step,
                tops=tops,
                statistics=tally.statistics if counts else None,
                measures_drift=tally.is_last,
                pass_number=tally.passes if self.comparison.is_on else None,
            )
            tally.passes += 1
            if micro.observed_O is not None:
                reduced = reduced - self._config.observation_coef * micro.observed_weight * observed.sum()
                if counts:
                    tally.statistics.add_observed(observed)
            if balance is not None:
                reduced = reduced + self._config.router_loss * float(micro.weights_N.sum()) * balance
            if load is not None:
                tally.expert_loads.append(load)
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
            tally.is_updated = True
            self.optimizer.step()
            self.model.update_shadow()
            tally.loss += loss
            tally.grad_norms.append(norm)
        else:
            tally.skipped += 1
        self.optimizer.zero_grad(set_to_none=True)

    @torch.no_grad()
    def _own_routes_logprobs(self, micro: Microbatch, tally: StepTally) -> Tensor | None:
        """Log-probabilities of the first pass of a step with the trainer's own choices of experts; None without router replay."""
        if self.model.replay is None or tally.replays:
            return None
        return self.model.token_logprobs(micro, is_replayed=False)[0]

    def _router_terms(self) -> tuple[Tensor | None, Tensor | None]:
        """The loss that balances experts, if it is used, and the largest load, of the last pass. None without experts."""
        routers = self.model.routers
        if not routers:
            return None, None
        with torch.no_grad():
            load = routers.largest_load()
        return routers.balance_loss() if self._config.router_loss > 0 else None, load
