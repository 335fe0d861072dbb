"""The optimizer, its learning rate, and the check that keeps bad gradients away from the weights."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rollbook.contracts.errors import RunError
from rollbook.contracts.plugin import load_on_demand
from rollbook.trainer.config import TrainerConfig
from rollbook.trainer.distributed.sharding import gathered
from rollbook.trainer.optimizer_state.chunked_adamw import ChunkedAdamW, HostStorage, StateStorage

RATE_OF_WIDE_MODELS, WIDE = 1e-6, 4096
"""Reinforcement learning of models with 7 billion parameters commonly uses this rate; they have this width."""
LORA_FACTOR = 10.0


def peak_rate(config: TrainerConfig, *, width: int) -> float:
    """`trainer.lr`, or a rate that suits the width of the model (decision 0031)."""
    if config.lr is not None:
        return config.lr
    rate = RATE_OF_WIDE_MODELS * max(1.0, (WIDE / width) ** 1.5)
    # Two digits, so that the rate in reports is the rate that is used.
    return float(f"{rate * (1.0 if config.lora is None else LORA_FACTOR):.1e}")


def learning_rate(config: TrainerConfig, step: int, *, peak: float) -> float:
    """Rate for batch `step` (1, 2, ...): linear warm-up to `peak`, then constant or decaying to 0 just after the last step.

    A pure function of the step: there is no scheduler state to restore.
    """
    if step <= config.warmup_steps:
        return peak * step / config.warmup_steps
    if config.schedule == "constant" or config.max_steps is None:
        return peak
    progress = min(1.0, (step - 1 - config.warmup_steps) / (config.max_steps - config.warmup_steps))
    if config.schedule == "linear":
        return peak * (1.0 - progress)
    return peak * 0.5 * (1.0 + math.cos(math.pi * progress))


STATE_OF_ADAMW = ("exp_avg", "exp_avg_sq")
STATE_OF_MUON = ("momentum_buffer",)


def build_optimizer(module: nn.Module, config: TrainerConfig, *, rate: float) -> torch.optim.Optimizer:
    """AdamW for all trained weights, or Muon for the matrices of hidden layers. Vectors are not decayed."""
    trained = [p for p in module.parameters() if p.requires_grad]
    matrices, vectors = [p for p in trained if p.ndim > 1], [p for p in trained if p.ndim <= 1]
    of_adamw: dict[str, Any] = {"lr": rate, "betas": config.betas, "eps": config.eps}
    if config.optimizer == "adamw":
        groups = [
            {"params": matrices, "weight_decay": config.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        if config.optimizer_state != "device":
            return ChunkedAdamW(groups, _storage(config.optimizer_state), **of_adamw)
        return torch.optim.AdamW(groups, **of_adamw, fused=True)
    # Muon is for maps between hidden states. Rows of an embedding are independent vectors; the output layer is one too.
    vocabulary = {id(p) for part in module.modules() if isinstance(part, nn.Embedding) for p in part.parameters()}
    vocabulary |= {id(p) for name, p in module.named_parameters() if "lm_head" in name}
    hidden = [p for p in matrices if p.ndim == 2 and id(p) not in vocabulary]
    chosen = {id(p) for p in hidden}
    return MuonWithAdamW(
        hidden,
        [
            {"params": [p for p in matrices if id(p) not in chosen], "weight_decay": config.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ],
        weight_decay=config.weight_decay,
        rate=rate,
        of_adamw={**of_adamw, "fused": True},
    )


def _storage(kind: str) -> StateStorage:
    if kind == "host":
        return HostStorage()
    eight_bit: StateStorage = load_on_demand("rollbook.trainer.optimizer_state.eight_bit:EightBitStorage")()
    return eight_bit


def allocate_state(optimizer: torch.optim.Optimizer) -> None:
    """Allocate the running means, as the optimizer does in its first step."""
    if isinstance(optimizer, ChunkedAdamW):
        optimizer.allocate()
        return
    for group in optimizer.param_groups:
        names = STATE_OF_MUON if is_muon(group) else STATE_OF_ADAMW
        for parameter in group["params"]:
            held = {name: torch.zeros_like(parameter, memory_format=torch.preserve_format) for name in names}
            if not is_muon(group):
                held["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            optimizer.state[parameter] = held


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of the running means in float32."""
    return sum(
        len(STATE_OF_MUON if is_muon(group) else STATE_OF_ADAMW) * parameter.numel() * parameter.element_size()
        for group in optimizer.param_groups
        for parameter in group["params"]
    )


def is_muon(group: Mapping[str, Any]) -> bool:
    """Whether Muon trains a parameter group."""
    return "momentum" in group


class MuonWithAdamW(torch.optim.Optimizer):
    """One optimizer with the groups and the state of both, so that a checkpoint holds them as it holds those of AdamW."""

    def __init__(
        self,
        hidden: Sequence[nn.Parameter],
        others: Sequence[dict[str, Any]],
        *,
        weight_decay: float,
        rate: float,
        of_adamw: Mapping[str, Any],
    ) -> None:
        # Scaled to the update size of AdamW, so that one learning rate suits both.
        self._muon = torch.optim.Muon(hidden, lr=rate, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw")
        self._adamw = torch.optim.AdamW([dict(group) for group in others], **of_adamw)
        super().__init__([*self._muon.param_groups, *self._adamw.param_groups], {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # the trainer has no closure
        # Loading a state replaces groups and state.
        self._muon.param_groups, self._adamw.param_groups = self.param_groups[:1], self.param_groups[1:]
        self._muon.state = self._adamw.state = self.state
        self._muon.step()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self._adamw.step()


def clip_large_gradient(gradients: Sequence[Tensor], max_norm: float) -> float:
    """Clip a gradient whose squares overflow. Returns its norm; infinity if the gradient itself is not finite.

    One group with extreme values must not cost the other groups of its minibatch their step.
    """
    largest = max(float(gathered(gradient.abs().max())) for gradient in gradients)
    if not math.isfinite(largest):
        return math.inf
    torch._foreach_div_(list(gradients), largest)
    norm = float(gathered(torch.nn.utils.get_total_norm(gradients, foreach=True)))
    torch._foreach_mul_(list(gradients), max_norm / norm)
    return norm * largest


class GradientGuard:
    """Skips optimizer steps with a bad gradient, and stops the run after too many in a row. Its count is part of a checkpoint."""

    def __init__(self, *, max_in_a_row: int, max_norm: float | None) -> None:
        self._max_in_a_row = max_in_a_row
        self._max_norm = max_norm
        self.skipped_in_a_row = 0

    def allows(self, *, norm: float, loss: float, step: int) -> bool:
        cause = self._fault(norm, loss)
        if cause is None:
            self.skipped_in_a_row = 0
            return True
        self.skipped_in_a_row += 1
        if self.skipped_in_a_row >= self._max_in_a_row:
            raise RunError(
                f"batch {step}: {cause}; {self.skipped_in_a_row} minibatches in a row were skipped. Lower trainer.lr or"
                " trainer.max_grad_norm, inspect the rewards and logprobs of the last batches (`rollbook replay` trains them"
                " again), or raise trainer.max_skipped_steps."
            )
        return False

    def _fault(self, norm: float, loss: float) -> str | None:
        if not math.isfinite(loss):
            return f"the loss is {loss}"
        if not math.isfinite(norm):
            return f"the gradient norm is {norm} with a loss of {loss:.4g}"
        if self._max_norm is not None and norm > self._max_norm:
            return f"the gradient norm {norm:.4g} is above skip_grad_norm_above {self._max_norm:g}"
        return None
