"""The trainer's metrics: the table, and the values computed from a batch. Names follow what users of other RL trainers know.

The manifest of a batch contains the oldest effective version of each group as of its decision, so a batch that is replayed after a
takeover has the same lag.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rollbook.contracts.batch import BatchEntry, BatchManifest, TrainingBatch
from rollbook.contracts.errors import RunError
from rollbook.contracts.freshness import lag
from rollbook.contracts.group import PromptGroup
from rollbook.contracts.policy import NOT_SAMPLED
from rollbook.contracts.task import TaskId
from rollbook.contracts.trajectory import EndReason, RolloutSample
from rollbook.telemetry.metrics import Metric, Reduction

MOST_LAG = 4
"""Divergences of tokens with this lag or more are one metric, so that the number of metrics is bounded."""

TRAINER_METRICS: tuple[Metric, ...] = (
    Metric("train/loss", "", "loss, mean over the minibatches of the step"),
    Metric("train/lr", "", "learning rate of the step"),
    Metric("train/grad_norm", "", "global gradient norm before clipping, mean over minibatches"),
    Metric("train/optimizer_steps", "steps", "optimizer steps taken", Reduction.SUM),
    Metric(
        "train/expert_load_max",
        "",
        "mixtures of experts: load of the busiest expert of any layer in a pass, in multiples of an even load; the largest",
        Reduction.MAX,
    ),
    Metric(
        "train/router_mismatch",
        "",
        "router replay: fraction of the sampler's choices (of a token in a layer) that the trainer would have made differently;"
        " all of them are replayed",
    ),
    Metric(
        "train/router_replayed",
        "",
        "router replay: fraction of the computed tokens whose choices were recorded",
    ),
    Metric(
        "train/own_routes_kl",
        "nats",
        "router replay: train/mean_kl of the first pass of a step without it, with the trainer's own choices of experts",
    ),
    Metric("train/replayed_kl", "nats", "router replay: train/mean_kl of the same pass with it"),
    Metric("train/skipped_steps", "steps", "minibatches skipped because their gradient was not finite", Reduction.SUM),
    Metric(
        "train/ppo_kl",
        "nats",
        "drift within the step, at its last minibatch: mean of exp(d) - d - 1, d = log current - log starting, with the policy at"
        " the start of the step; 0 with one minibatch. With old_logprobs = engine, over the tokens of the first pass",
    ),
    Metric("train/ppo_clip_frac", "", "fraction of the trained tokens whose gradient was clipped"),
    Metric("train/ratio_mean", "", "mean of current / starting, over the tokens of train/ppo_kl; 1 with one minibatch"),
    Metric("train/entropy", "nats", "entropy of the policy at trained tokens, at their temperature"),
    Metric(
        "train/mean_kl",
        "nats",
        "divergence of the policy at the start of the step from the sampler, by lag and numerics together: mean of"
        " exp(m) - m - 1, m = log starting - log sampled. With several minibatches and old_logprobs = engine, this and the"
        " metrics of m below are over the first minibatch and the first pass of the last one",
    ),
    Metric(
        "train/numerics_kl",
        "nats",
        "train/mean_kl over tokens of lag 0, without those of train/mixed_cache_share, and of top-p, top-k and grammars: numerical"
        " differences of engine and trainer, 0 with exactness = bitwise. Tokens whose lag is unknown are in train/mean_kl only:"
        " those of unknown publications, and after a restart some of the trainer before",
    ),
    Metric(
        "train/inexact_share",
        "",
        "fraction of train/compared_tokens whose logprob differs from the sampler's in any bit; only where equal bits are promised",
    ),
    Metric(
        "train/compared_tokens",
        "tokens",
        "tokens whose logprobs were compared to the bit: those of train/numerics_kl; in every fourth step without any, some of lag"
        " 1, if there is memory for a copy of the weights. Only where sampler and trainer promise equal bits (exactness)",
        Reduction.SUM,
    ),
    Metric(
        "train/mixed_cache_share",
        "",
        "fraction of the tokens that were sampled after an update of weights met their request and read keys of older weights; none"
        " with kv_after_update = recompute",
    ),
    *(Metric(f"train/lag_kl_{n}", "nats", f"train/mean_kl over tokens of lag {n}") for n in range(1, MOST_LAG)),
    Metric(f"train/lag_kl_{MOST_LAG}", "nats", f"train/mean_kl over tokens of lag {MOST_LAG} and more"),
    Metric("train/mismatch_weight_mean", "", "mean of starting / sampled over trained tokens"),
    Metric("train/ess", "", "effective sample size of starting / sampled, as a fraction of the tokens"),
    Metric("train/correction_mean", "", "mean of the correction's weights over trained tokens"),
    Metric("train/correction_clip_frac", "", "fraction of the trained tokens whose correction weight was clipped"),
    Metric(
        "train/correction_ess", "", "effective sample size of the correction's weights, as a fraction of the tokens"
    ),
    Metric("train/reference_kl", "nats", "divergence from the initial policy, mean over trained tokens"),
    Metric("train/teacher_kl", "nats", "divergence from the teacher, mean over trained tokens with its scores"),
    Metric(
        "train/observation_loss", "nats", "cross-entropy of the environment's tokens, with trainer.observation_coef"
    ),
    Metric("train/unknown_logprob_tokens", "tokens", "trained tokens without a sampling logprob", Reduction.SUM),
    Metric("train/tokens", "tokens", "trained tokens", Reduction.SUM),
    Metric("train/sequences", "sequences", "trained sequences", Reduction.SUM),
    Metric("train/passes", "passes", "forward and backward passes through the model", Reduction.SUM),
    Metric("train/padding_share", "", "fraction of the computed tokens that was padding"),
    Metric(
        "train/shared_token_share", "", "fraction of the sequences' tokens that was computed with another sequence's"
    ),
    Metric("train/computed_tokens", "tokens", "tokens that went through the model, padding included", Reduction.SUM),
    Metric(
        "train/diverged_steps", "steps", "replayed steps whose weights differ from those acknowledged", Reduction.SUM
    ),
    Metric("perf/sample_wait_time", "s", "waited for the batch", Reduction.SUM),
    Metric("perf/train_time", "s", "trained on the batch, digest included", Reduction.SUM),
    Metric("perf/digest_time", "s", "digest of the weights, with their copy to main memory, concurrent with training"),
    Metric("perf/acknowledge_time", "s", "the ledger recorded the step, concurrent with training"),
    Metric("perf/weight_sync_time", "s", "time to publish the weights, concurrent with training", Reduction.SUM),
    Metric("perf/publish_wait_time", "s", "training waited for the previous publication to complete", Reduction.SUM),
    Metric("perf/checkpoint_time", "s", "time to write a checkpoint, concurrent with training", Reduction.SUM),
    Metric(
        "perf/checkpoint_wait_time", "s", "training waited for the copy of its state for a checkpoint", Reduction.SUM
    ),
    Metric("perf/step_time", "s", "whole step, waiting included", Reduction.SUM),
    Metric("perf/wait_time_ratio", "", "wait / (wait + train)"),
    Metric("perf/overlap_ratio", "", "the trainer's utilisation: train / (wait + train)"),
    Metric("perf/tokens_per_s", "tokens/s", "trained tokens per second of training"),
    Metric(
        "perf/mfu",
        "",
        "model FLOPs utilisation: the batch's operations per second over the devices' peak; null where the peak is unknown",
    ),
    Metric("perf/memory_gb", "GB", "peak memory so far: of the device, or of the process on a CPU", Reduction.MAX),
    Metric("perf/pass_tokens", "tokens", "tokens that a pass of the step may have", Reduction.MAX),
    Metric("perf/checkpointing", "", "1 if activations were recomputed in the backward pass", Reduction.MAX),
    Metric("perf/out_of_memory", "attempts", "attempts of the step that did not fit into memory", Reduction.SUM),
    Metric("perf/failed_pass_tokens", "tokens", "`perf/pass_tokens` of the first such attempt", Reduction.MAX),
    Metric("async/version_offset_mean", "steps", "lag of the batch's groups, mean"),
    Metric("async/version_offset_max", "steps", "lag of the batch's oldest group", Reduction.MAX),
    Metric("async/version_offset_min", "steps", "lag of the batch's newest group", Reduction.MIN),
    Metric("async/version_offset_long", "steps", "mean lag of the groups of the longest quarter of the samples"),
    Metric("async/version_offset_short", "steps", "the same for the shortest quarter of the samples"),
    Metric("async/unknown_version_groups", "groups", "groups whose sampling version is unknown", Reduction.SUM),
    Metric(
        "async/unscorable_samples", "samples", "samples without a reward: advantage 0, never reward 0", Reduction.SUM
    ),
    Metric(
        "async/unusable_groups",
        "groups",
        "groups of the batch that could not be trained; they have weight 0",
        Reduction.SUM,
    ),
    Metric(
        "async/masked_tokens", "tokens", "tokens masked because they are older than the staleness bound", Reduction.SUM
    ),
    Metric("async/masked_share", "", "masked fraction of the trainable tokens of the batch"),
    Metric("async/masked_share_long", "", "the same for the longest quarter of the samples"),
    Metric("async/masked_share_short", "", "the same for the shortest quarter of the samples"),
    Metric("async/masked_share_first", "", "the same for the first quarter of the tokens of each sample"),
    Metric("async/masked_share_last", "", "the same for the last quarter of the tokens of each sample"),
    Metric("async/masked_first_turns", "", "fraction of the samples of several turns whose first turn is not trained"),
    Metric("async/masked_samples", "samples", "samples of which every trainable token is masked", Reduction.SUM),
    Metric("async/masked_tasks", "tasks", "tasks of the batch with a masked token", Reduction.MAX),
    Metric("async/late_samples", "samples", "samples that came after the first part of their group", Reduction.SUM),
    Metric("rollout/reward", "", "mean reward of the batch's scorable samples"),
    Metric("rollout/accuracy", "", "solved fraction of the samples whose environment reports whether they are solved"),
    Metric("rollout/response_len", "tokens", "trained tokens per sample, mean"),
    Metric("rollout/truncated_ratio", "", "samples that ended by a limit"),
    Metric(
        "rollout/cut_ratio",
        "",
        "samples that ended by a limit of tokens: their last answer was cut, or no token was left",
    ),
    Metric("rollout/turns", "turns", "turns per sample, mean"),
    Metric("rollout/groups", "groups", "groups in the batch; parts with batch policy `parts`", Reduction.SUM),
    Metric("rollout/samples", "samples", "samples in the batch", Reduction.SUM),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LagReport:
    """Lag over the groups of one batch, in steps; None where no group has a known version."""

    mean: float | None
    maximum: int | None
    minimum: int | None
    num_unknown: int = 0

    def metrics(self) -> dict[str, float | None]:
        return {
            "async/version_offset_mean": self.mean,
            "async/version_offset_max": self.maximum,
            "async/version_offset_min": self.minimum,
            "async/unknown_version_groups": self.num_unknown,
        }


def check_lag(manifest: BatchManifest, *, max_head_offpolicy_versions: int) -> LagReport:
    """Lag of every group of the batch. Raises `RunError` when one is negative or above the staleness bound."""
    known: list[int] = []
    for entry in manifest.entries:
        if entry.oldest_version is None:
            continue
        group_lag = lag(step=manifest.step, oldest_version=entry.oldest_version)
        if not 0 <= group_lag <= max_head_offpolicy_versions:
            raise RunError(
                f"batch {manifest.step}: group {entry.group_id} was sampled by version {entry.oldest_version}, a lag of {group_lag}"
                f" with max_head_offpolicy_versions = {max_head_offpolicy_versions}. The ledger must never decide such a batch;"
                " the step is not trained."
            )
        known.append(group_lag)
    return LagReport(
        mean=sum(known) / len(known) if known else None,
        maximum=max(known, default=None),
        minimum=min(known, default=None),
        num_unknown=len(manifest.entries) - len(known),
    )


def publication_lags(batch: TrainingBatch) -> dict[int, int]:
    """The lag of the tokens of a publication, for the oldest publication of each group: the manifest contains its version.

    Effective versions rise with the ids of publications, so the oldest version of a group is that of its lowest id. Groups with
    tokens of unknown publications tell nothing.
    """
    found: dict[int, int] = {}
    for entry, group in batch.entries():
        if entry.oldest_version is None:
            continue
        rows = [row for sample in group.samples for row in sample.sequences]
        trained = [row.versions[row.loss_mask & ~entry.is_masked(row)] for row in rows]
        oldest = min((int(versions.min()) for versions in trained if len(versions)), default=-1)
        if oldest >= 0:
            found[oldest] = lag(step=batch.step, oldest_version=entry.oldest_version)
    return dict(sorted(found.items()))


def mixed_caches(versions_T: NDArray[np.int32]) -> NDArray[np.bool_]:
    """Which tokens were sampled after a weight update met their request. With `inference.kv_after_update = "keep"` they read keys
    of older weights, so no forward of one version gives their logprobs."""
    is_sampled = versions_T != NOT_SAMPLED
    is_first = is_sampled & ~np.concatenate([[False], is_sampled[:-1]])
    # The first token of the same turn.
    firsts = np.maximum.accumulate(np.where(is_first, np.arange(len(versions_T)), 0))
    mixed: NDArray[np.bool_] = is_sampled & (versions_T != versions_T[firsts])
    return mixed


def token_lags(publications: NDArray[np.int32], known: Mapping[int, int]) -> NDArray[np.int8]:
    """The lag of each token, at most `MOST_LAG`; -1 where the `publication_lags` of the batch do not tell it."""
    ids, lags = list(known), [*known.values(), 0]

    def lag_of(publication: int) -> int:
        at = bisect_right(ids, publication) - 1
        # Lags fall as ids rise, down to 0: between two equal ones there is no other.
        is_known = at >= 0 and (ids[at] == publication or lags[at] == lags[at + 1])
        return min(lags[at], MOST_LAG) if is_known else -1

    if (publications == publications[0]).all():
        return np.full(len(publications), lag_of(int(publications[0])), dtype=np.int8)
    unique, inverse = np.unique(publications, return_inverse=True)
    return np.array([lag_of(publication) for publication in unique.tolist()], dtype=np.int8)[inverse]


@dataclass(frozen=True, slots=True)
class _SampleMask:
    task_id: TaskId
    trainable: int
    masked: int
    masked_first: int
    """In the first quarter of its trainable tokens; `masked_last`: in the last quarter."""
    masked_last: int
    is_first_turn_masked: bool | None
    """None: it has one turn."""
    lag: int | None
    """Lag of its group; None if the version is unknown."""

    @classmethod
    def of(cls, entry: BatchEntry, group: PromptGroup, sample: RolloutSample, *, step: int) -> "_SampleMask":
        masked = entry.masked_tokens(sample)
        quarter = quarter_of(len(masked))
        return cls(
            task_id=group.task_id,
            trainable=len(masked),
            masked=int(masked.sum()),
            masked_first=int(masked[:quarter].sum()),
            masked_last=int(masked[len(masked) - quarter :].sum()),
            is_first_turn_masked=entry.is_first_turn_masked(sample) if len(sample.turns) > 1 else None,
            lag=None if entry.oldest_version is None else lag(step=step, oldest_version=entry.oldest_version),
        )


def quarter_of(count: int) -> int:
    """A quarter of a number of tokens or samples, rounded up."""
    return -(-count // 4)


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskReport:
    """The masked tokens and the lag of a batch, by sample."""

    samples: tuple[_SampleMask, ...]
    """Scorable samples, by length."""

    @classmethod
    def of(cls, batch: TrainingBatch) -> "MaskReport":
        found = [
            _SampleMask.of(entry, group, sample, step=batch.step)
            for entry, group in batch.entries()
            for sample in group.scorable
        ]
        return cls(samples=tuple(sorted(found, key=lambda sample: sample.trainable)))

    @property
    def tokens(self) -> int:
        return sum(sample.masked for sample in self.samples)

    def by_task(self, most: int) -> dict[TaskId, float]:
        """The masked share of the tasks with masked tokens, the largest first."""
        tasks: dict[TaskId, list[_SampleMask]] = {}
        for sample in self.samples:
            tasks.setdefault(sample.task_id, []).append(sample)
        shares = {task: _masked_share(samples) or 0.0 for task, samples in tasks.items()}
        ranked = sorted((task for task in shares if shares[task]), key=lambda task: -shares[task])
        return {task: round(shares[task], 4) for task in ranked[:most]}

    def metrics(self) -> dict[str, float | None]:
        quarter = quarter_of(len(self.samples))
        short, long = self.samples[:quarter], self.samples[-quarter:] if quarter else ()
        return {
            "async/version_offset_long": _mean([float(sample.lag) for sample in long if sample.lag is not None]),
            "async/version_offset_short": _mean([float(sample.lag) for sample in short if sample.lag is not None]),
            "async/masked_tokens": self.tokens,
            "async/masked_share": _masked_share(self.samples),
            "async/masked_share_long": _masked_share(long),
            "async/masked_share_short": _masked_share(short),
            "async/masked_share_first": self._share_of_quarter([sample.masked_first for sample in self.samples]),
            "async/masked_share_last": self._share_of_quarter([sample.masked_last for sample in self.samples]),
            "async/masked_first_turns": _mean(
                [float(s.is_first_turn_masked) for s in self.samples if s.is_first_turn_masked is not None]
            ),
            "async/masked_samples": sum(sample.masked == sample.trainable for sample in self.samples),
            "async/masked_tasks": len({sample.task_id for sample in self.samples if sample.masked}),
        }

    def _share_of_quarter(self, masked: Sequence[int]) -> float | None:
        tokens = sum(quarter_of(sample.trainable) for sample in self.samples)
        return sum(masked) / tokens if tokens else None


def _masked_share(samples: Sequence[_SampleMask]) -> float | None:
    trainable = sum(sample.trainable for sample in samples)
    return sum(sample.masked for sample in samples) / trainable if trainable else None


def batch_metrics(batch: TrainingBatch) -> dict[str, float | None]:
    """Metrics of the batch's rollouts. Rewards and solved rates are over scorable samples only."""
    samples = [sample for group in batch.groups for sample in group.samples]
    scorable = [sample for sample in samples if sample.is_scorable]
    return {
        "rollout/reward": _mean([sample.reward for sample in scorable if sample.reward is not None]),
        "rollout/accuracy": _mean([float(sample.solved) for sample in scorable if sample.solved is not None]),
        "rollout/response_len": _mean([float(sample.num_trained) for sample in samples]),
        "rollout/truncated_ratio": _mean([float(sample.finish_reason.is_truncated) for sample in samples]),
        "rollout/cut_ratio": _mean([float(sample.finish_reason is EndReason.MAX_TOKENS) for sample in samples]),
        "rollout/turns": _mean([float(len(sample.turns)) for sample in samples]),
        "rollout/groups": len(batch.groups),
        "rollout/samples": len(samples),
        "async/late_samples": sum(len(group.samples) for group in batch.groups if group.part > 1),
        "async/unscorable_samples": len(samples) - len(scorable),
        "async/unusable_groups": len(batch.unusable),
    }


def time_metrics(
    *, wait_s: float, train_s: float, num_tokens: int, flops: float = 0.0, peak_flops: float | None = None
) -> dict[str, float | None]:
    whole = wait_s + train_s
    return {
        "perf/mfu": flops / train_s / peak_flops if peak_flops and train_s > 0 else None,
        "perf/sample_wait_time": wait_s,
        "perf/train_time": train_s,
        "perf/wait_time_ratio": wait_s / whole if whole > 0 else None,
        "perf/overlap_ratio": train_s / whole if whole > 0 else None,
        "perf/tokens_per_s": num_tokens / train_s if train_s > 0 else None,
    }


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
