"""A live adapter: its low-rank factors, the base matrices, and the merged matrices."""

# G matrices of a group, O out, I in, R rank

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rollbook.contracts.weights import Adapter
from rollbook.inference.weights.lora import LowRankPair

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
"""Largest accepted difference when a product is computed again, relative to the largest number. A damaged byte differs more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterMerge:
    adapter: Adapter
    pairs: Sequence[LowRankPair]
    factors: Mapping[str, Tensor]
    """The published tensors, by name."""
    base: Mapping[str, Tensor]
    """Every adapted matrix without the adapter."""
    transposed: Collection[str]
    """Matrices that are stored as (in, out)."""

    def merged_one_by_one(self) -> dict[str, Tensor]:
        return {pair.target: self._merged(pair) for pair in self.pairs}

    def _merged(self, pair: LowRankPair) -> Tensor:
        """In float32 and in PEFT's order of operations, so that the result equals a model merged by PEFT."""
        base = self.base[pair.target]
        delta = self.factors[pair.b].float() @ self.factors[pair.a].float()
        if pair.target in self.transposed:
            delta = delta.T
        return (base.float() + delta * pair.scale).to(base.dtype)

    def merged_by_groups(self) -> dict[str, Tensor]:
        """The same, with one product for all matrices of one shape: a few launches instead of hundreds."""
        groups: dict[tuple[object, ...], list[LowRankPair]] = {}
        for pair in self.pairs:
            base = self.base[pair.target]
            key = (base.shape, base.dtype, pair.rank, pair.scale, pair.target in self.transposed)
            groups.setdefault(key, []).append(pair)
        merged: dict[str, Tensor] = {}
        for pairs in groups.values():
            b_GOR = torch.stack([self.factors[pair.b] for pair in pairs]).float()
            a_GRI = torch.stack([self.factors[pair.a] for pair in pairs]).float()
            delta_GOI = torch.bmm(b_GOR, a_GRI).mul_(pairs[0].scale)
            if pairs[0].target in self.transposed:
                delta_GOI = delta_GOI.transpose(1, 2)
            base_GOI = torch.stack([self.base[pair.target] for pair in pairs])
            merged_GOI = delta_GOI.add_(base_GOI).to(base_GOI.dtype)
            merged.update(zip((pair.target for pair in pairs), merged_GOI, strict=True))
        return merged

    def is_live_in(self, weights: Mapping[str, Tensor], *, by_groups: bool) -> bool:
        """Whether the weights are the merge of this adapter and its base. Synchronises with the device once."""
        expected = self.merged_by_groups() if by_groups else self.merged_one_by_one()
        # Not `>`: a comparison with NaN must not pass.
        is_equal = [
            (weights[name] - matrix).abs().amax() <= matrix.abs().amax() * TOLERANCE.get(matrix.dtype, 1e-5)
            for name, matrix in expected.items()
        ]
        return bool(torch.stack(is_equal).all())
