"""A mixture of experts, read from its Hugging Face module. No token is dropped, and a result does not depend on other tokens.

The router is called: families differ in how they choose and weigh experts, and all return the same. The weights of the experts are
read, and each expert multiplies all of its tokens at once. The whole part is called with a few numbers, and must give the result of
the module.
"""

# M tokens, K choices a token, P = M x K pairs in the order of their experts, X experts, E hidden size, I and O sizes of a product,
# F feed-forward size

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from rollbook.contracts.errors import is_out_of_memory
from rollbook.numerics.module_parts import (
    ACTIVATIONS,
    GATE_PARTS,
    Activation,
    UnsupportedModelError,
    activation_of,
    parts_of,
    refuse_other_parts,
)

ROUTERS, EXPERTS = ("gate", "router"), "experts"
SHARED, SHARED_GATE = ("shared_expert", "shared_experts", "shared_mlp"), "shared_expert_gate"
WEIGHTS = {"gate_up_proj", "down_proj"}
BIASES = {f"{name}_bias" for name in WEIGHTS}
INEXACT = "grouped products of experts have no fixed order of sums"
"""Why sampler and trainer do not compute the same bits."""
ALIGNED = 8
"""Sizes of grouped products in bfloat16 are multiples of it."""
PROBED_TOKENS = 5
TOLERANCE = {torch.float32: 1e-4, torch.float16: 0.01, torch.bfloat16: 0.05}
"""Largest accepted relative error. A part that is forgotten has one above 0.1."""


@dataclass(frozen=True, slots=True)
class ClampedGate:
    """Gates and ups alternate: (up + 1) x gate x sigmoid(alpha x gate), both within a limit."""

    alpha: float
    limit: float

    def __call__(self, both_PF: Tensor) -> Tensor:
        gates, ups = both_PF[..., ::2].clamp(max=self.limit), both_PF[..., 1::2].clamp(-self.limit, self.limit)
        return (ups + 1) * (gates * torch.sigmoid(gates * self.alpha))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Experts:
    """The weights are views of the module's."""

    count: int
    choices: int
    """Experts of a token."""
    router: Any
    router_inputs: tuple[Any, ...]
    """Besides the hidden states."""
    gate_up_XEF: Tensor
    gate_up_bias_XF: Tensor | None
    down_XFE: Tensor
    down_bias_XE: Tensor | None
    gate: Activation | ClampedGate

    @classmethod
    def of(cls, block: Any) -> "Experts":
        """`block`: the module of router, experts and, if there is one, the expert of all tokens."""
        experts, router = getattr(block, EXPERTS), router_of(block)
        own = {name for name, _ in experts.named_parameters(recurse=False)}
        if own not in (WEIGHTS, WEIGHTS | BIASES) or not getattr(experts, "has_gate", True):
            raise UnsupportedModelError(f"its experts have the parts {', '.join(sorted(own)) or 'of another module'}")
        gate_up, down = experts.gate_up_proj, experts.down_proj
        if not getattr(experts, "is_transposed", False):
            gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
        sizes = {*gate_up.shape[1:], *down.shape[1:]}
        if gate_up.is_cuda and (gate_up.dtype is not torch.bfloat16 or any(size % ALIGNED for size in sizes)):
            raise UnsupportedModelError(
                f"a GPU computes experts in bfloat16 and with sizes that are multiples of {ALIGNED}, not those in "
                f"{gate_up.dtype} with {', '.join(map(str, sorted(sizes)))}"
            )
        if gate_up.is_cuda and not hasattr(F, "grouped_mm"):
            raise UnsupportedModelError(f"PyTorch {torch.__version__} has no grouped products")
        names = list(inspect.signature(router.forward).parameters)[1:]
        missing = [name for name in names if not hasattr(block, name)]
        choices = getattr(router, "top_k", None)
        if missing or not isinstance(choices, int):
            raise UnsupportedModelError(f"its routers of type {type(router).__name__} need other inputs")
        return cls(
            count=len(gate_up),
            choices=choices,
            router=router,
            router_inputs=tuple(getattr(block, name) for name in names),
            gate_up_XEF=gate_up.detach(),
            gate_up_bias_XF=getattr(experts, "gate_up_proj_bias", None),
            down_XFE=down.detach(),
            down_bias_XE=getattr(experts, "down_proj_bias", None),
            gate=_gate_of(experts),
        )

    def routed(self, x_ME: Tensor) -> tuple[Tensor, Tensor]:
        """The chosen experts of each token and their weights (M, K)."""
        _, weights_MK, chosen_MK = self.router(x_ME, *self.router_inputs)
        return chosen_MK, weights_MK

    def __call__(
        self, x_ME: Tensor, chosen_MK: Tensor, weights_MK: Tensor, *, gate: Callable[[Tensor], Tensor] | None = None
    ) -> Tensor:
        """`gate`: a faster one than ours, if the gate is an activation."""
        # Stable: which of two equal experts comes first must not depend on the device.
        expert_P, order_P = chosen_MK.flatten().sort(stable=True)
        ends_X = torch.searchsorted(expert_P, torch.arange(self.count, device=x_ME.device), right=True).int()
        both_PF = grouped_product(x_ME[order_P // self.choices], self.gate_up_XEF, ends_X)
        if self.gate_up_bias_XF is not None:
            both_PF += self.gate_up_bias_XF[expert_P]
        gated_PF = self.gated(both_PF) if gate is None or isinstance(self.gate, ClampedGate) else gate(both_PF)
        out_PE = grouped_product(gated_PF, self.down_XFE, ends_X)
        if self.down_bias_XE is not None:
            out_PE += self.down_bias_XE[expert_P]
        # Back to the order of the tokens, so that each adds its experts in the order of their weights.
        out_MKE = torch.empty_like(out_PE).index_copy_(0, order_P, out_PE).view(*chosen_MK.shape, -1)
        return (out_MKE * weights_MK[..., None]).sum(dim=1).to(x_ME.dtype)

    def gated(self, both_PF: Tensor) -> Tensor:
        if isinstance(self.gate, ClampedGate):
            return self.gate(both_PF)
        gates, ups = both_PF.chunk(2, dim=-1)
        gated: Tensor = ACTIVATIONS[self.gate](gates) * ups
        return gated


def grouped_product(x_PI: Tensor, weight_XIO: Tensor, ends_X: Tensor) -> Tensor:
    """Rows up to `ends_X[0]` times the first matrix, up to `ends_X[1]` times the second, and so on."""
    if x_PI.is_cuda:
        # Reads the ends on the device, so it can be captured.
        return F.grouped_mm(x_PI, weight_XIO, offs=ends_X)
    out_PO = x_PI.new_empty(len(x_PI), weight_XIO.shape[2])
    start = 0
    for expert, end in enumerate(ends_X.tolist()):
        if end > start:
            torch.mm(x_PI[start:end], weight_XIO[expert], out=out_PO[start:end])
        start = end
    return out_PO


def is_mixture(block: Any) -> bool:
    return hasattr(block, EXPERTS)


def router_of(block: Any) -> Any:
    found = [getattr(block, name) for name in ROUTERS if hasattr(block, name)]
    if len(found) != 1:
        raise UnsupportedModelError(f"{type(block).__name__} has no {' or '.join(ROUTERS)}")
    return found[0]


def shared_of(block: Any) -> tuple[str, Any] | None:
    """Name and module of the feed-forward part that computes all tokens; None if there is none."""
    found = [(name, part) for name in SHARED if (part := getattr(block, name, None)) is not None]
    return found[0] if found else None


def check_mixture(block: Any) -> None:
    """Raises `UnsupportedModelError` if a block has parts that are not known here."""
    refuse_other_parts("mixture", block, {*ROUTERS, EXPERTS, *SHARED, SHARED_GATE})
    if (shared := shared_of(block)) is not None:
        refuse_other_parts("shared expert", shared[1], {"down_proj"} | parts_of(shared[1], GATE_PARTS))


@torch.no_grad()
def compare(experts: Experts, block: Any) -> None:
    """Raises `UnsupportedModelError` if the block computes something else."""
    weight = experts.gate_up_XEF
    if weight.is_meta:
        return
    generator = torch.Generator().manual_seed(0)
    x_ME = torch.randn(PROBED_TOKENS, weight.shape[1], generator=generator).to(weight.device, weight.dtype)
    expected = block(x_ME[None])
    expected_ME = (expected[0] if isinstance(expected, tuple) else expected).view(x_ME.shape).float()
    try:
        found_ME = experts(x_ME, *experts.routed(x_ME))
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
        raise UnsupportedModelError(f"this machine cannot compute its experts in groups: {error}") from error
    if (shared := shared_of(block)) is not None:
        added_ME = shared[1](x_ME)
        if hasattr(block, SHARED_GATE):
            added_ME = torch.sigmoid(getattr(block, SHARED_GATE)(x_ME)) * added_ME
        found_ME = found_ME + added_ME
    deviation = (found_ME.float() - expected_ME).square().mean().sqrt() / (expected_ME.square().mean().sqrt() + 1e-12)
    # Not `>`: a comparison with NaN must not pass.
    if not deviation <= TOLERANCE.get(weight.dtype, 0.0):
        raise UnsupportedModelError(f"its mixtures of experts have the formula of {type(block).__name__}")


def _gate_of(experts: Any) -> Activation | ClampedGate:
    if hasattr(experts, "limit") and hasattr(experts, "alpha"):
        return ClampedGate(float(experts.alpha), float(experts.limit))
    if not getattr(experts, "is_concatenated", True):
        raise UnsupportedModelError(f"its experts have the gate of {type(experts).__name__}")
    return activation_of(experts)
