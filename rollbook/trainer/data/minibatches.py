"""Splits a batch into rows, minibatches (one optimizer step each) and microbatches (one forward pass each).

Pure functions of the batch, the settings, the seed and the step, so a replayed batch is split the same way. Each trained token of a
scorable sample is in exactly one microbatch, unless the manifest masks it: a masked token is context, like one of the environment.
Losses, sequence-level ratios and length normalisation thus run over the tokens that are left.

Two properties of causal models save compute. Tokens after the last trained token are not computed. Rows of a packed pass share the
tokens that they have in common at their start (`prefixes`). In a padded pass, only a row that is a prefix of another one does.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rollbook.contracts.batch import PassSplit, TrainingBatch
from rollbook.contracts.errors import RunError
from rollbook.contracts.freshness import lag
from rollbook.contracts.group import GroupId
from rollbook.contracts.policy import NOT_SAMPLED, Routes, unknown_choice
from rollbook.contracts.trajectory import TokenRow
from rollbook.trainer.advantages.registry import credit
from rollbook.trainer.config import SPLIT_SETTINGS, TrainerConfig
from rollbook.trainer.data.prefixes import PackedSequences, packed_passes, prefix_order, prefix_tree
from rollbook.trainer.metrics import MOST_LAG, mixed_caches, publication_lags, token_lags

PAD_ID = 0
"""Any id works: padding is on the right, where causal attention does not look."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainRow:
    """One sequence with its training targets. Target i is predicted at input position `predicted_at[i]`."""

    group_id: GroupId
    sample: int
    """Number of the sample in the batch; its sequences share one advantage and stay in one minibatch."""
    inputs: NDArray[np.int32]
    predicted_at: NDArray[np.int64]
    targets: NDArray[np.int32]
    sampled_logprobs: NDArray[np.float32]
    """Logprobs of the sampling distribution; NaN where the producer did not record them."""
    advantage: float
    temperature: float
    token_advantages: NDArray[np.float32] | None = None
    """Advantages of the user's function or of the producer, for each target. They replace `advantage`."""
    token_weights: NDArray[np.float32] | None = None
    """Factor of each target's loss; None: 1."""
    reference_logprobs: NDArray[np.float32] | None = None
    """Logprobs of the reference policy from the producer; None, or NaN: unknown."""
    teacher_logprobs: NDArray[np.float32] | None = None
    """Logprobs of the teacher; None, or NaN: unknown."""
    top_ids: NDArray[np.int32] | None = None
    """For each target: the tokens that the teacher likes best there, -1 where there are fewer. None: not trained."""
    top_logprobs: NDArray[np.float32] | None = None
    """Their logprobs under the teacher; NaN where there is none."""
    place: tuple[int, int] = (0, 0)
    """Number of the sample in its group, and of the sequence in the sample."""
    num_tokens: int = 0
    """Length of the whole sequence."""
    publications: NDArray[np.int32] | None = None
    """For each target: the publication that sampled it, -1 where unknown. None: all unknown."""
    lags: NDArray[np.int8] | None = None
    """For each target: `token_lags`. None: unknown."""
    mixed: NDArray[np.bool_] | None = None
    """For each target: `mixed_caches`. None: none is."""
    is_renormalised: bool = False
    """See `RolloutSample.is_renormalised`."""
    observed_at: NDArray[np.int64] | None = None
    """Input positions that predict the environment's tokens between the turns, if they are trained."""
    observed: NDArray[np.int32] | None = None
    """These tokens."""
    routes: Routes | None = None
    """The experts that the sampler chose for each input, if they are replayed."""
    trained_share: float = 1.0
    """Fraction of the batch's scorable samples that have a row: the others are masked or have no trained token."""

    def __len__(self) -> int:
        return len(self.inputs)

    @property
    def num_trained(self) -> int:
        return len(self.targets)

    @property
    def num_observed(self) -> int:
        return 0 if self.observed is None else len(self.observed)


@dataclass(frozen=True, slots=True)
class RowSource:
    """Where a row of a pass is from."""

    group_id: GroupId
    sample: int
    """Number of the sample in its group; `sequence`: of the sequence in the sample."""
    sequence: int


# B rows of inputs, T their length, N trained tokens, K likeliest tokens of a teacher. Packed: B is 1, and T counts the computed
# tokens of all sequences.
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Microbatch:
    """One forward pass. Token n is predicted at flat position `predicted_at_N[n]` of the B*T inputs."""

    inputs_BT: NDArray[np.int64]
    sequences: PackedSequences | None
    """The packed sequences; None where each sequence has its own row, padded to the longest."""
    num_shared: int
    """Tokens of the rows that are not computed, because another row of the pass has them too."""
    predicted_at_N: NDArray[np.int64]
    targets_N: NDArray[np.int64]
    sampled_logprobs_N: NDArray[np.float32]
    advantages_N: NDArray[np.float32]
    temperatures_N: NDArray[np.float32]
    weights_N: NDArray[np.float32]
    """The minibatch's loss is the sum of weight times token loss over its microbatches. The weights implement the reduction."""
    row_of_N: NDArray[np.int64]
    """Index of the sequence in this pass, for sequence-level losses."""
    num_rows: int
    is_padding_BT: NDArray[np.bool_] | None = None
    """None: no input is padding."""
    members: tuple[int, ...] = ()
    """The rows of this pass, as numbers of the minibatch's rows."""
    sources: tuple[RowSource, ...] = ()
    """Of each row."""
    index_N: NDArray[np.int32] | None = None
    """Index of each target in its row."""
    reference_logprobs_N: NDArray[np.float32] | None = None
    """From the producer, NaN where unknown; None if no sequence has them."""
    teacher_logprobs_N: NDArray[np.float32] | None = None
    """Of a teacher, NaN where unknown; None if no sequence has them."""
    top_ids_NK: NDArray[np.int32] | None = None
    """The tokens that a teacher likes best, if the divergence from it is trained; -1 where there are fewer."""
    top_logprobs_NK: NDArray[np.float32] | None = None
    """Their logprobs under the teacher; NaN where there is none."""
    lags_N: NDArray[np.int8] | None = None
    """Lag of each token, for metrics; -1 where unknown. None: all unknown."""
    mixed_N: NDArray[np.bool_] | None = None
    """Whether an update of weights met the request before this token, for metrics."""
    renormalised_N: NDArray[np.bool_] | None = None
    """Whether the logprob is that of a part of the vocabulary. None: none is."""
    publications_N: NDArray[np.int32] | None = None
    """The publication that sampled each token; -1 where unknown. None: all unknown."""
    observed_at_O: NDArray[np.int64] | None = None
    """Flat positions that predict tokens of the environment, if they are trained."""
    observed_O: NDArray[np.int64] | None = None
    """These tokens."""
    observed_weight: float = 0.0
    """Weight of the cross-entropy of each: 1 / their number in the minibatch."""
    routes_TLK: Routes | None = None
    """The experts that the sampler chose for each of the flat inputs, if they are replayed. Rows that share a token have the
    choices of one of them."""

    @property
    def num_padding(self) -> int:
        return 0 if self.is_padding_BT is None else int(self.is_padding_BT.sum())

    @property
    def num_trained(self) -> int:
        return len(self.targets_N)

    def with_observed(self) -> "Microbatch":
        """The pass with the tokens of the environment after its own targets."""
        if self.observed_at_O is None or self.observed_O is None:
            return self
        plain = np.ones(len(self.observed_O), dtype=np.float32)
        return replace(
            self,
            predicted_at_N=np.concatenate([self.predicted_at_N, self.observed_at_O]),
            targets_N=np.concatenate([self.targets_N, self.observed_O]),
            temperatures_N=np.concatenate([self.temperatures_N, plain]),
        )

    def with_tops(self) -> "Microbatch":
        """The pass with the tokens that a teacher likes best as further targets of each token, in columns after its own."""
        if self.top_ids_NK is None:
            return self
        num_observed = len(self.targets_N) - len(self.top_ids_NK)
        more_NK = np.pad(np.maximum(self.top_ids_NK, 0), ((0, num_observed), (0, 0)))
        return replace(self, targets_N=np.column_stack([self.targets_N, more_NK.astype(np.int64)]))


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


MAX_TEACHER_GAP = 20.0


def teacher_gaps(row: TokenRow) -> NDArray[np.float32]:
    """log teacher - log sampled of each token; 0 where one of them is unknown.

    The mean over the policy's samples is minus the divergence KL(policy || teacher), and as an advantage it has its gradient.
    """
    assert row.teacher_logprobs is not None
    gaps = np.clip(row.teacher_logprobs - row.logprobs, -MAX_TEACHER_GAP, MAX_TEACHER_GAP)
    return np.where(np.isnan(gaps), 0.0, gaps).astype(np.float32)


def distill_weight(config: TrainerConfig, step: int) -> float:
    """`distill_coef` at a step."""
    if config.distill_until is None:
        return config.recipe.distill_coef
    return config.recipe.distill_coef * max(0.0, 1.0 - (step - 1) / config.distill_until)


def flatten(batch: TrainingBatch, config: TrainerConfig) -> list[TrainRow]:
    """The sequences of scorable samples that have trained tokens which are not masked, in the batch's order."""
    found = credit(batch, config)
    rows: list[TrainRow] = []
    number = -1
    lags = publication_lags(batch)
    distill_coef = distill_weight(config, batch.step)
    has_tops = distill_coef > 0 and config.distill_kl != "sampled"
    if distill_coef:
        _check_scores(batch, config)
    if config.router_replay and not any(
        row.routes is not None for group in batch.groups for s in group.scorable for row in s.sequences
    ):
        raise RunError(
            f"batch {batch.step} has no routes of the sampler, and trainer.router_replay is true: the policy servers do not record"
            " them. Start those at inference.urls with inference.record_routes = true"
        )
    num_scorable = sum(len(group.scorable) for group in batch.groups)
    for entry, group in batch.entries():
        for in_group, sample in enumerate(group.samples):
            number += 1
            if not sample.is_scorable or (config.mask_truncated and sample.finish_reason.is_truncated):
                continue
            for sequence, row in enumerate(sample.sequences):
                trained = np.flatnonzero(row.loss_mask & ~entry.is_masked(row))
                if len(trained) == 0:
                    continue
                observed = None
                if config.observation_coef:
                    between = slice(trained[0] + 1, trained[-1])
                    is_observed = (row.versions == NOT_SAMPLED) & ~sample.written_mask(sequence)
                    observed = trained[0] + 1 + np.flatnonzero(is_observed[between])
                by_token = found.by_token.get((number, sequence))
                if distill_coef and not has_tops and row.teacher_logprobs is not None:
                    base = np.float32(found.by_sample[number]) if by_token is None else by_token
                    by_token = base + distill_coef * teacher_gaps(row)
                rows.append(
                    TrainRow(
                        group_id=group.id,
                        sample=number,
                        inputs=row.token_ids[: trained[-1]],
                        predicted_at=trained - 1,
                        targets=row.token_ids[trained],
                        sampled_logprobs=row.logprobs[trained],
                        advantage=float(found.by_sample[number]),
                        temperature=sample.sampling.temperature,
                        place=(in_group, sequence),
                        num_tokens=len(row),
                        publications=row.versions[trained],
                        lags=token_lags(row.versions[trained], lags),
                        mixed=mixed_caches(row.versions)[trained],
                        is_renormalised=sample.is_renormalised,
                        token_advantages=None if by_token is None else by_token[trained],
                        token_weights=None if row.weights is None else row.weights[trained],
                        reference_logprobs=None if row.reference_logprobs is None else row.reference_logprobs[trained],
                        teacher_logprobs=None if row.teacher_logprobs is None else row.teacher_logprobs[trained],
                        top_ids=row.teacher_top_ids[trained] if has_tops and row.teacher_top_ids is not None else None,
                        top_logprobs=row.teacher_top_logprobs[trained].astype(np.float32)
                        if has_tops and row.teacher_top_logprobs is not None
                        else None,
                        observed_at=None if observed is None else observed - 1,
                        observed=None if observed is None else row.token_ids[observed],
                        routes=row.routes[: trained[-1]] if config.router_replay and row.routes is not None else None,
                    )
                )
    num_samples = len({row.sample for row in rows})
    if num_samples == num_scorable:
        return rows
    return [replace(row, trained_share=num_samples / num_scorable) for row in rows]


def _check_scores(batch: TrainingBatch, config: TrainerConfig) -> None:
    """Raises `RunError` if the batch has no scores of a teacher and nothing else to learn from, or no likeliest tokens.

    Beside rewards, a batch may consist of tasks without a teacher.
    """
    rows = [row for group in batch.groups for sample in group.scorable for row in sample.sequences]
    is_taught = any(row.teacher_logprobs is not None or row.teacher_top_ids is not None for row in rows)
    if not is_taught and config.recipe.advantage == "none":
        raise RunError(
            f"batch {batch.step} has no scores of a teacher, and trainer.distill_coef is {config.recipe.distill_coef:g}: set"
            " [rollout.teacher]"
        )
    if is_taught and config.distill_kl != "sampled" and all(row.teacher_top_ids is None for row in rows):
        raise RunError(
            f"batch {batch.step} has the teacher's scores of the sampled tokens only, and trainer.distill_kl is"
            f' "{config.distill_kl}": set rollout.teacher.top_k, or distill_kl = "sampled"'
        )


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


def pad(rows: Sequence[TrainRow], bundles: Sequence[Sequence[int]], weights: Sequence[float]) -> Microbatch:
    """Pad the first rows of the bundles into one array, and index each bundle's trained tokens into it."""
    width = max(len(rows[bundle[0]]) for bundle in bundles)
    inputs = np.full((len(bundles), width), PAD_ID, dtype=np.int64)
    is_padding = np.ones(inputs.shape, dtype=np.bool_)
    for line, bundle in enumerate(bundles):
        length = len(rows[bundle[0]])
        inputs[line, :length] = rows[bundle[0]].inputs
        is_padding[line, :length] = False
    return _microbatch(
        rows,
        [number for bundle in bundles for number in bundle],
        weights,
        inputs_BT=inputs,
        sequences=None,
        is_padding_BT=is_padding if is_padding.any() else None,
        positions=[
            np.arange(len(rows[number])) + line * width for line, bundle in enumerate(bundles) for number in bundle
        ],
    )


def pack(
    rows: Sequence[TrainRow], members: Sequence[int], common: Sequence[int], weights: Sequence[float]
) -> Microbatch:
    """Concatenate the tokens that each member adds to those before it. `common`: of the members, which are in prefix order."""
    sequences, indices = prefix_tree([len(rows[number]) for number in members], common)
    inputs = np.empty(sequences.num_computed, dtype=np.int64)
    for number, index in zip(members, indices, strict=True):
        inputs[index] = rows[number].inputs
    return _microbatch(
        rows,
        members,
        weights,
        inputs_BT=inputs[np.newaxis],
        sequences=sequences,
        is_padding_BT=None,
        positions=indices,
    )


def _microbatch(
    rows: Sequence[TrainRow],
    members: Sequence[int],
    weights: Sequence[float],
    *,
    inputs_BT: NDArray[np.int64],
    sequences: PackedSequences | None,
    is_padding_BT: NDArray[np.bool_] | None,
    positions: Sequence[NDArray[np.int64]],
) -> Microbatch:
    """`positions`: for each member, the flat position of each of its input tokens."""
    chosen = [rows[number] for number in members]
    placed = list(zip(chosen, positions, strict=True))
    observing = [(row, at) for row, at in placed if row.num_observed]
    counts = np.array([row.num_trained for row in chosen])
    return Microbatch(
        inputs_BT=inputs_BT,
        sequences=sequences,
        is_padding_BT=is_padding_BT,
        num_shared=sum(len(row) for row in chosen)
        - inputs_BT.size
        + (0 if is_padding_BT is None else int(is_padding_BT.sum())),
        predicted_at_N=np.concatenate([at[row.predicted_at] for row, at in placed]),
        targets_N=np.concatenate([row.targets for row in chosen]).astype(np.int64),
        sampled_logprobs_N=np.concatenate([row.sampled_logprobs for row in chosen]),
        advantages_N=_per_token(
            [(row.advantage if row.token_advantages is None else row.token_advantages, row) for row in chosen]
        ),
        temperatures_N=np.repeat(np.array([row.temperature for row in chosen], dtype=np.float32), counts),
        weights_N=_per_token(
            [
                (weights[n] * (1.0 if factors is None else factors), rows[n])
                for n in members
                for factors in (rows[n].token_weights,)
            ]
        ),
        row_of_N=np.repeat(np.arange(len(members), dtype=np.int64), counts),
        num_rows=len(members),
        members=tuple(members),
        sources=tuple(RowSource(row.group_id, *row.place) for row in chosen),
        index_N=np.concatenate([row.predicted_at + 1 for row in chosen]).astype(np.int32),
        reference_logprobs_N=_per_token(
            [(np.nan if row.reference_logprobs is None else row.reference_logprobs, row) for row in chosen]
        )
        if any(row.reference_logprobs is not None for row in chosen)
        else None,
        teacher_logprobs_N=_per_token(
            [(np.nan if row.teacher_logprobs is None else row.teacher_logprobs, row) for row in chosen]
        )
        if any(row.teacher_logprobs is not None for row in chosen)
        else None,
        top_ids_NK=_tops([row.top_ids for row in chosen], counts, unknown=-1),
        top_logprobs_NK=_tops([row.top_logprobs for row in chosen], counts, unknown=np.nan),
        mixed_N=np.concatenate([np.zeros(row.num_trained, bool) if row.mixed is None else row.mixed for row in chosen]),
        renormalised_N=np.repeat([row.is_renormalised for row in chosen], counts)
        if any(row.is_renormalised for row in chosen)
        else None,
        lags_N=np.concatenate(
            [np.full(row.num_trained, -1, np.int8) if row.lags is None else row.lags for row in chosen]
        ),
        publications_N=np.concatenate(
            [np.full(row.num_trained, -1, np.int32) if row.publications is None else row.publications for row in chosen]
        ),
        observed_at_O=np.concatenate([at[row.observed_at] for row, at in observing]) if observing else None,
        observed_O=np.concatenate([row.observed for row, _ in observing if row.observed is not None]).astype(np.int64)
        if observing
        else None,
        routes_TLK=_routes(placed, inputs_BT.size),
    )


def _routes(placed: Sequence[tuple[TrainRow, NDArray[np.int64]]], num_inputs: int) -> Routes | None:
    """The routes of all inputs of a pass; unknown for padding. None: no row has any."""
    recorded = [(row.routes, at) for row, at in placed if row.routes is not None]
    if not recorded:
        return None
    first = recorded[0][0]
    routes = np.full((num_inputs, *first.shape[1:]), unknown_choice(first.dtype), dtype=first.dtype)
    for own, at in recorded:
        routes[at] = own
    return routes


def _per_token(values: Sequence[tuple[ArrayLike, TrainRow]]) -> NDArray[np.float32]:
    """For each target of the rows, in order: the row's own value, or the value that all its targets share."""
    if not any(isinstance(value, np.ndarray) for value, _ in values):
        shared = np.array([value for value, _ in values], dtype=np.float32)
        return shared.repeat([row.num_trained for _, row in values])
    return np.concatenate([np.broadcast_to(np.asarray(value, np.float32), row.num_trained) for value, row in values])


def _tops(values: Sequence[NDArray[Any] | None], counts: NDArray[np.int64], *, unknown: float) -> NDArray[Any] | None:
    """One array of the rows' likeliest tokens, with `unknown` where a row has fewer columns than another, or none."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    width = max(value.shape[1] for value in known)
    joined = np.full((int(counts.sum()), width), unknown, dtype=known[0].dtype)
    for value, end, count in zip(values, np.cumsum(counts), counts, strict=True):
        if value is not None:
            joined[end - count : end, : value.shape[1]] = value
    return joined


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


def check_vocabulary(rows: Sequence[TrainRow], size: int, *, step: int) -> None:
    """Before the step changes anything. The ledger refuses such groups if it knows the vocabulary of the run's model."""
    for row in rows:
        highest = max(int(row.inputs.max(initial=0)), int(row.targets.max(initial=0)))
        if row.top_ids is not None:
            highest = max(highest, int(row.top_ids.max(initial=0)))
        if highest >= size:
            raise RunError(
                f"batch {step}: {row.group_id} has token id {highest}, but the vocabulary has {size} tokens. Data and trainer must"
                " use the same model and tokenizer."
            )


def check_routes(rows: Sequence[TrainRow], shape: tuple[int, int], *, step: int) -> None:
    """Before the step changes anything: a GPU would read outside of its memory."""
    layers, experts = shape
    first: Routes | None = None
    for row in rows:
        if (routes := row.routes) is None:
            continue
        first = routes if first is None else first
        choices = routes[routes != unknown_choice(routes.dtype)]
        if routes.shape[1] != layers or int(choices.max(initial=0)) >= experts:
            raise RunError(
                f"batch {step}: {row.group_id} has routes of {routes.shape[1]} layers and experts up to"
                f" {choices.max(initial=0)}, but the model has {layers} layers of {experts} experts. Sampler and trainer must use"
                " the same model."
            )
        if routes.shape[1:] != first.shape[1:] or routes.dtype != first.dtype:
            raise RunError(
                f"batch {step}: {row.group_id} has routes of shape {routes.shape[1:]} ({routes.dtype}), other groups of"
                f" {first.shape[1:]} ({first.dtype}). All samplers must use the same model."
            )


def plan(rows: Sequence[TrainRow], config: TrainerConfig, *, step: int, is_packed: bool) -> list[Minibatch]:
    """The whole batch: in each epoch at most `ppo_n_minibatches` optimizer steps, each split into passes."""
    parts = [
        part
        for epoch in range(config.ppo_epochs)
        for part in split(rows, config.ppo_n_minibatches, seed=config.seed, step=step, epoch=epoch)
    ]
    return [plan_minibatch(part, config, is_packed=is_packed) for part in parts]
