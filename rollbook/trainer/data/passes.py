"""Microbatches: the arrays of one forward pass, padded or packed.

Rows of a packed pass share the tokens that they have in common at their start (`prefixes`). In a padded pass, only a row that is a
prefix of another one does.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rollbook.contracts.group import GroupId
from rollbook.contracts.policy import Routes, unknown_choice
from rollbook.trainer.data.prefixes import PackedSequences, prefix_tree
from rollbook.trainer.data.rows import TrainRow

PAD_ID = 0
"""Any id works: padding is on the right, where causal attention does not look."""


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
