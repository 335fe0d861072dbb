"""An adapter that is live: its halves, the base it stands beside, and what the two make together."""

# G matrices of a group, O out, I in, R rank

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rollbook.contracts.adapter import Adapter
from rollbook.inference.weights.lora import LowRankPair

SLACK = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
"""How far computing the same product again may be off, as a share of the largest number. A damaged byte is off by more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    adapter: Adapter
    pairs: Sequence[LowRankPair]
    halves: Mapping[str, Tensor]
    """As they were published, by name."""
    base: Mapping[str, Tensor]
    """Of every adapted matrix, as it is without the adapter."""
    turned: Collection[str]
    """Matrices that are kept as (in, out)."""

    def merged(self, pair: LowRankPair) -> Tensor:
        """In float32 and in PEFT's order of operations: the numbers are those of a model merged by PEFT."""
        base = self.base[pair.target]
        added = self.halves[pair.b].float() @ self.halves[pair.a].float()
        if pair.target in self.turned:
            added = added.T
        return (base.float() + added * pair.scale).to(base.dtype)

    def merged_one_by_one(self) -> dict[str, Tensor]:
        return {pair.target: self.merged(pair) for pair in self.pairs}

    def merged_by_groups(self) -> dict[str, Tensor]:
        """The same, matrices of one shape in one product: a few launches in place of hundreds."""
        groups: dict[tuple[object, ...], list[LowRankPair]] = {}
        for pair in self.pairs:
            base = self.base[pair.target]
            key = (base.shape, base.dtype, pair.rank, pair.scale, pair.target in self.turned)
            groups.setdefault(key, []).append(pair)
        merged: dict[str, Tensor] = {}
        for pairs in groups.values():
            b_GOR = torch.stack([self.halves[pair.b] for pair in pairs]).float()
            a_GRI = torch.stack([self.halves[pair.a] for pair in pairs]).float()
            added_GOI = torch.bmm(b_GOR, a_GRI).mul_(pairs[0].scale)
            if pairs[0].target in self.turned:
                added_GOI = added_GOI.transpose(1, 2)
            base_GOI = torch.stack([self.base[pair.target] for pair in pairs])
            whole_GOI = added_GOI.add_(base_GOI).to(base_GOI.dtype)
            merged.update(zip((pair.target for pair in pairs), whole_GOI, strict=True))
        return merged

    def is_live_in(self, weights: Mapping[str, Tensor], *, by_groups: bool) -> bool:
        """Whether the weights are what this adapter makes of its base. Waited for once, not matrix by matrix."""
        expected = self.merged_by_groups() if by_groups else self.merged_one_by_one()
        # Not "greater than": what is not a number must not pass.
        is_right = [
            (weights[name] - matrix).abs().amax() <= matrix.abs().amax() * SLACK.get(matrix.dtype, 1e-5)
            for name, matrix in expected.items()
        ]
        return bool(torch.stack(is_right).all())
