"""The parts of a Hugging Face module by name, and the activations that are known."""

from collections.abc import Collection, Sequence
from typing import Any, Literal

import torch
from torch.nn import functional as F

Activation = Literal["silu", "gelu_tanh"]
ACTIVATIONS: dict[Activation, Any] = {"silu": F.silu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh")}
QUERY_PARTS, GATE_PARTS = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")
"""Or one layer for all of them: `qkv_proj`, `gate_up_proj`."""
DELTA_PARTS = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
GROUPED_DELTA_PARTS = ("in_proj_qkvz", "in_proj_ba")
"""The projections of a gated delta layer: of Qwen3.5, and of Qwen3-Next."""


class UnsupportedModelError(Exception):
    """A model has something that is not known here. The text says what."""


def parts_of(module: Any, names: Sequence[str]) -> set[str]:
    """The names of the projections of one input: these, or that of one layer for all of them."""
    joint = {"qkv_proj" if names is QUERY_PARTS else "gate_up_proj"}
    found = {name for name, _ in module.named_children()}
    if not (joint <= found or set(names) <= found):
        raise UnsupportedModelError(f"{type(module).__name__} has no {', '.join(names)}")
    return joint if joint <= found else set(names)


def refuse_other_parts(what: str, module: Any, known: set[str], *, parameters: Collection[str] = ()) -> None:
    """Raises `UnsupportedModelError` for other children with parameters than these, and for other `parameters`."""
    others = {name for name, _ in module.named_parameters(recurse=False)} - set(parameters)
    others |= {name for name, child in module.named_children() if any(True for _ in child.parameters())} - known
    if others:
        raise UnsupportedModelError(f"its {what} has other parts: {', '.join(sorted(others))}")


def activation_of(mlp: Any) -> Activation:
    """Of the gate of a feed-forward part."""
    function = getattr(mlp, "act_fn", getattr(mlp, "activation_fn", None))
    x = torch.linspace(-4, 4, 65)
    for name, known in ACTIVATIONS.items():
        if function is not None and torch.allclose(function(x), known(x), rtol=0, atol=1e-6):
            return name
    raise UnsupportedModelError(f"its activation is {type(function).__name__}")
