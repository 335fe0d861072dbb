"""What a step reports: sums over its minibatches, and the metrics made of them."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rollbook.trainer.data.minibatches import Minibatch
from rollbook.trainer.exactness import UnequalToken
from rollbook.trainer.losses.statistics import TokenStatistics


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
    unequal: UnequalToken | None = None
    """The token that differs most from the sampler, among those whose logprobs should have its bits."""


@dataclass(slots=True)
class StepTally:
    """Sums over the minibatches of one step."""

    statistics: TokenStatistics = field(default_factory=TokenStatistics)
    loss: float = 0.0
    grad_norms: list[float] = field(default_factory=list)
    expert_loads: list[Tensor] = field(default_factory=list)
    replays: list[Tensor] = field(default_factory=list)
    """`RouterReplay.counts` of each pass."""
    routes_kl: list[float | None] = field(default_factory=list)
    """Divergence from the sampler in the first pass: with the trainer's own choices of experts, and with those of the sampler."""
    skipped: int = 0
    passes: int = 0
    """Passes of this rank."""
    is_last: bool = True
    """The minibatch that is trained is the last one of the step."""
    is_updated: bool = False
    """The weights were changed."""

    def metrics(
        self, minibatches: Sequence[Minibatch], *, epochs: int, rate: float, compares_bits: bool
    ) -> dict[str, float | None]:
        """`minibatches`: those of all ranks. `epochs`: a batch that is trained several times counts once. `rate`: of learning."""
        taken = len(self.grad_norms)
        passes = [micro for minibatch in minibatches for micro in minibatch.microbatches]
        computed = sum(micro.inputs_BT.size for micro in passes)
        padding = sum(micro.num_padding for micro in passes)
        shared = sum(micro.num_shared for micro in passes)
        statistics = self.statistics.metrics()
        if not compares_bits:
            statistics["train/inexact_share"] = statistics["train/compared_tokens"] = None
        return {
            **statistics,
            "train/loss": self.loss / taken if taken else None,
            "train/grad_norm": sum(self.grad_norms) / taken if taken else None,
            "train/lr": rate,
            "train/optimizer_steps": taken,
            "train/skipped_steps": self.skipped,
            "train/expert_load_max": float(torch.stack(self.expert_loads).max()) if self.expert_loads else None,
            **self._replay_metrics(),
            "train/tokens": sum(minibatch.num_trained for minibatch in minibatches) // epochs,
            "train/sequences": sum(minibatch.num_rows for minibatch in minibatches) // epochs,
            "train/passes": len(passes),
            "train/computed_tokens": computed,
            "train/padding_share": padding / computed if computed else None,
            "train/shared_token_share": shared / (shared + computed - padding) if computed else None,
        }

    def _replay_metrics(self) -> dict[str, float | None]:
        replays, routes_kl = self.replays, self.routes_kl
        differing, replayed, known, tokens = torch.stack(replays).sum(dim=0).tolist() if replays else [0.0] * 4
        before, after = routes_kl or (None, None)
        return {
            "train/router_mismatch": differing / replayed if replayed else None,
            "train/router_replayed": known / tokens if tokens else None,
            "train/own_routes_kl": before,
            "train/replayed_kl": after,
        }
