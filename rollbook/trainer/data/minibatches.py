"""Splits the rows of a batch into minibatches (one optimizer step each) and microbatches (one forward pass each).

Pure functions of the batch, the settings, the seed and the step, so a replayed batch is split the same way. Each trained token of a
scorable sample is in exactly one microbatch, unless the manifest masks it.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from rollbook.contracts.batch import PassSplit
from rollbook.contracts.freshness import lag
from rollbook.trainer.config import SPLIT_SETTINGS, TrainerConfig
from rollbook.trainer.data.passes import Microbatch, pack, pad
from rollbook.trainer.data.prefixes import packed_passes, prefix_order
from rollbook.trainer.data.rows import TrainRow, check_routes, check_vocabulary
from rollbook.trainer.metrics import MOST_LAG


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Minibatch:
    """One optimizer step."""

    microbatches: tuple[Microbatch, ...]
    num_rows: int
    num_trained: int
    longest: int
    """Tokens of the longest row: no pass can be smaller than the one that has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSettings:
    """What the split of a batch depends on, besides the batch."""

    config: TrainerConfig
    is_packed: bool
    vocabulary_size: int
    routes_shape: tuple[int, int] | None = None
    """With router replay: layers with experts, and experts in each."""

    @property
    def split(self) -> PassSplit:
        return PassSplit.of(self.config.tokens_per_pass, self.config.gradient_checkpointing)

    def with_split(self, split: PassSplit | None) -> "PlanSettings":
        """The settings with another split; None: the same."""
        if split is None:
            return self
        changes = dict(zip(SPLIT_SETTINGS, (split.max_tokens, split.checkpointing), strict=True))
        return replace(self, config=self.config.model_copy(update=changes))


def split(rows: Sequence[TrainRow], count: int, *, seed: int, step: int, epoch: int = 0) -> list[list[TrainRow]]:
    """Up to `count` non-empty minibatches of about equally many tokens. A sample's sequences stay together.

    Samples are assigned in an order shuffled by (seed, step, epoch), each to the minibatch with the fewest tokens so far.
    """
    if count == 1:
        return [list(rows)] if rows else []
    samples: dict[int, list[TrainRow]] = {}
    for row in rows:
        samples.setdefault(row.sample, []).append(row)
    numbers = np.array(sorted(samples), dtype=np.int64)
    minibatches: list[list[TrainRow]] = [[] for _ in range(min(count, len(samples)))]
    num_tokens = [0] * len(minibatches)
    for number in np.random.default_rng((seed, step, epoch) if epoch else (seed, step)).permutation(numbers):
        smallest = num_tokens.index(min(num_tokens))
        minibatches[smallest].extend(samples[int(number)])
        num_tokens[smallest] += sum(len(row) for row in samples[int(number)])
    return minibatches


def token_weights(rows: Sequence[TrainRow], *, reduction: str, fixed_length: int | None = None) -> list[float]:
    """The weight of each trained token of each row, so that the reduced loss is a plain weighted sum.

    `sequence_mean` and `fixed_length` are means over samples: how an episode is split into sequences changes nothing. Samples
    without a row count too, as samples whose loss is 0. Their number is spread over the minibatches of a batch in proportion.
    """
    total = sum(row.num_trained for row in rows)
    if reduction == "token_mean":
        return [1.0 / total] * len(rows)
    lengths: Counter[int] = Counter()
    for row in rows:
        lengths[row.sample] += row.num_trained
    if reduction == "sequence_mean":
        return [row.trained_share / (len(lengths) * lengths[row.sample]) for row in rows]
    if reduction == "fixed_length" and fixed_length is not None:
        return [row.trained_share / (len(lengths) * fixed_length) for row in rows]
    raise ValueError(f"unknown reduction {reduction!r} with length {fixed_length}")


def bundled(rows: Sequence[TrainRow], *, max_trained: int) -> list[list[int]]:
    """Row numbers in bundles that share one input row: the inputs of all other rows are prefixes of the first row of the bundle.

    A bundle holds at most `max_trained` trained tokens, or a single row: its logits must fit in memory.
    """
    bundles: list[list[int]] = []
    capacity = 0
    for number, common in zip(*prefix_order([row.inputs for row in rows]), strict=True):
        if common == len(rows[number]) and rows[number].num_trained <= capacity:
            bundles[-1].append(number)
            capacity -= rows[number].num_trained
        else:
            bundles.append([number])
            capacity = max_trained - rows[number].num_trained
    return bundles


def padded_passes(
    lengths: Sequence[int], trained: Sequence[int], *, max_tokens: int, pass_cost: int
) -> Iterator[list[int]]:
    """The inputs of each padded pass, longest first.

    A pass ends before it would exceed `max_tokens` (padded inputs, or trained tokens), and when its padding would cost more than
    another pass.
    """
    chosen: list[int] = []
    longest = padding = num_trained = 0
    for number in sorted(range(len(lengths)), key=lambda n: (-lengths[n], n)):
        adds = longest - lengths[number]
        is_full = (len(chosen) + 1) * longest > max_tokens or num_trained + trained[number] > max_tokens
        if chosen and (is_full or padding + adds > pass_cost):
            yield chosen
            chosen, padding, num_trained = [], 0, 0
        if not chosen:
            longest, adds = lengths[number], 0
        chosen.append(number)
        padding += adds
        num_trained += trained[number]
    if chosen:
        yield chosen


def plan_minibatch(rows: Sequence[TrainRow], config: TrainerConfig, *, is_packed: bool) -> Minibatch:
    """Split one minibatch into passes."""
    weights = token_weights(rows, reduction=config.recipe.reduction, fixed_length=config.reduction_length)
    passes = list((_packed if is_packed else _padded)(rows, weights, config))
    if num_observed := sum(row.num_observed for row in rows):
        passes = [replace(micro, observed_weight=1.0 / num_observed) for micro in passes]
    return Minibatch(
        microbatches=tuple(passes),
        num_rows=len(rows),
        num_trained=sum(row.num_trained for row in rows),
        longest=max(map(len, rows), default=0),
    )


def smaller_split(split: PassSplit, minibatches: Sequence[Minibatch]) -> PassSplit | None:
    """What to try after these minibatches did not fit into memory: checkpointing of all layers, and passes of half the size.

    None: every sequence that is long had its own pass already, with checkpointing of all layers.
    """
    largest = max((micro.inputs_BT.size for part in minibatches for micro in part.microbatches), default=0)
    longest = max((part.longest for part in minibatches), default=0)
    tokens = min(split.max_tokens, largest)
    if tokens <= longest and split.checkpoints_all:
        return None
    return PassSplit(max_tokens=max(longest, tokens // 2, 1), gradient_checkpointing=True)


def _packed(rows: Sequence[TrainRow], weights: Sequence[float], config: TrainerConfig) -> Iterator[Microbatch]:
    order, common = prefix_order([row.inputs for row in rows])
    chosen = packed_passes(
        [len(rows[number]) for number in order],
        common,
        [rows[number].num_trained for number in order],
        max_tokens=config.tokens_per_pass,
        ranks=config.ranks,
    )
    for part in chosen:
        yield pack(rows, order[part.start : part.stop], common[part.start : part.stop], weights)


def _padded(rows: Sequence[TrainRow], weights: Sequence[float], config: TrainerConfig) -> Iterator[Microbatch]:
    bundles = bundled(rows, max_trained=config.tokens_per_pass)
    chosen = padded_passes(
        [len(rows[bundle[0]]) for bundle in bundles],
        [sum(rows[number].num_trained for number in bundle) for bundle in bundles],
        max_tokens=config.tokens_per_pass,
        pass_cost=config.pass_cost_tokens,
    )
    for numbers in chosen:
        yield pad(rows, [bundles[number] for number in numbers], weights)


def with_lags(
    minibatches: Sequence[Minibatch], published: Mapping[int, int], *, step: int, has_mixed: bool = True
) -> list[Minibatch]:
    """The minibatches with the lags that the versions of the trainer's own publications tell, by id, where they are unknown.

    `has_mixed`: False where requests compute their keys again after an update, so that no token reads older ones.
    """

    def known(micro: Microbatch) -> Microbatch:
        if not has_mixed:
            micro = replace(micro, mixed_N=None)
        if micro.lags_N is None or micro.publications_N is None or (micro.lags_N >= 0).all():
            return micro
        lags = micro.lags_N.copy()
        for publication in np.unique(micro.publications_N[lags < 0]).tolist():
            if publication in published:
                found = lag(step=step, oldest_version=published[publication])
                lags[micro.publications_N == publication] = min(found, MOST_LAG)
        return replace(micro, lags_N=lags)

    return [replace(part, microbatches=tuple(known(micro) for micro in part.microbatches)) for part in minibatches]


def plan_rows(rows: Sequence[TrainRow], settings: PlanSettings, *, step: int) -> list[Minibatch]:
    """Check the rows of a batch, and split them."""
    check_vocabulary(rows, settings.vocabulary_size, step=step)
    if settings.routes_shape is not None:
        check_routes(rows, settings.routes_shape, step=step)
    return plan(rows, settings.config, step=step, is_packed=settings.is_packed)


def plan(rows: Sequence[TrainRow], config: TrainerConfig, *, step: int, is_packed: bool) -> list[Minibatch]:
    """The whole batch: in each epoch at most `ppo_n_minibatches` optimizer steps, each split into passes."""
    parts = [
        part
        for epoch in range(config.ppo_epochs)
        for part in split(rows, config.ppo_n_minibatches, seed=config.seed, step=step, epoch=epoch)
    ]
    return [plan_minibatch(part, config, is_packed=is_packed) for part in parts]
