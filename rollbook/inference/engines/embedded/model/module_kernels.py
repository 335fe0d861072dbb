"""Triton kernels inside a Hugging Face module, while it computes a decode step (decision 0054).

Attention of one query a row, and norms. Outside a step the module is as transformers made it: prefills, scored prompts and the
plain forwards that a start-up check compares with use its own attention and norms.
"""

# N rows, H key/value heads, R query heads, T positions, D key size, V value size

# ruff: noqa: PLR0917  # transformers gives attention its arguments by position

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from rollbook.numerics.module_parts import UnsupportedModelError
from rollbook.numerics.operations import kernels_missing, rms_norm
from rollbook.numerics.recipe import Norm

if kernels_missing is None:
    from rollbook.numerics.triton_one_query import launch_one_query

NAME, REPLACED = "rollbook_one_query", "sdpa"
"""Names of the attention within a decode step, and of the one that it replaces."""
DEVICE = "cuda"
LARGEST_HEADS = {torch.bfloat16: 256, torch.float16: 256, torch.float32: 128}
"""More does not fit in the memory of a program on every GPU."""
WITHOUT_EFFECT = frozenset(("position_ids", "use_cache", "sliding_window", "is_causal", "output_router_logits"))
"""Arguments that do not change what `sdpa` computes for one query: the mask has the window."""
NORM_ROUNDINGS = 4
"""Largest accepted difference of a norm, in roundings of the model's type: its sum has another order."""


def one_query_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """What `sdpa` of transformers computes. Keys and values are neither copied nor repeated if each row has one query."""
    if dropout or not _is_supported(module, query, key, value, attention_mask, options):
        found: tuple[Tensor, Tensor | None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **options
        )
        return found
    rows, heads, _, size = query.shape
    out_NRV = query.new_empty((rows, heads, value.shape[3]))
    mask_NT = None if attention_mask is None else attention_mask.expand(rows, 1, 1, key.shape[2])[:, 0, 0]
    scale = size**-0.5 if scaling is None else scaling
    launch_one_query(query[:, :, 0], key, value, mask_NT, out_NRV, scale=scale)
    return out_NRV[:, None], None


def _is_supported(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: Mapping[str, Any]
) -> bool:
    if kernels_missing is not None or query.device.type != DEVICE or query.dtype not in LARGEST_HEADS:
        return False
    if any(tensor.dtype != query.dtype or tensor.requires_grad for tensor in (query, key, value)):
        return False
    if any(
        option is not None and option is not False for name, option in options.items() if name not in WITHOUT_EFFECT
    ):
        return False
    rows, heads, count, size = query.shape
    groups, length = getattr(module, "num_key_value_groups", 1), key.shape[2]
    return (
        count == 1
        and max(size, value.shape[3]) <= LARGEST_HEADS[query.dtype]
        and key.shape == (rows, heads // groups, length, size)
        and value.shape[:3] == key.shape[:3]
        and heads == key.shape[1] * groups
        and (
            mask is None
            or (mask.dtype in (torch.bool, query.dtype) and mask.shape in ((rows, 1, 1, length), (1, 1, 1, length)))
        )
    )


class StepKernels:
    """The kernels of one module. `str` lists what they compute."""

    def __init__(self, module: Any) -> None:
        reason = why_not_replaced(module)
        self._module = module
        self._has_attention = reason is None
        self._norms = _replaced_norms(module)
        self.reason = None if self._has_attention or self._norms else reason
        """Why there is nothing to compute; None if there is."""
        attention = "attention" if reason is None else f"no attention, because {reason}"
        self._text = f"{attention}, {len(self._norms)} norms"

    def __str__(self) -> str:
        return self._text

    @contextmanager
    def in_module(self) -> Iterator[None]:
        """Within the context, the module computes with the kernels."""
        try:
            if self._has_attention:
                self._module.set_attn_implementation(NAME)
            for part, forward in self._norms:
                vars(part)["forward"] = forward
            yield
        finally:
            for part, _ in self._norms:
                vars(part).pop("forward", None)
            if self._has_attention:
                self._module.set_attn_implementation(REPLACED)


def why_not_replaced(module: nn.Module) -> str | None:
    """Why the attention of a module cannot be replaced by name; None if it can."""
    if _attentions(module) != {REPLACED}:
        return f"its attention is not {REPLACED}"
    # Sparse attention puts its choice of positions into the mask only for attention whose name it knows. A probe of a few tokens
    # would not detect the difference.
    for kind in {type(part) for part in module.modules()}:
        if kind.__module__.startswith("torch."):
            continue
        try:
            source = inspect.getsource(kind)
        except (OSError, TypeError):
            return f"the source of {kind.__name__} is missing"
        if f'"{REPLACED}"' in source or f"'{REPLACED}'" in source:
            return f"{kind.__name__} depends on the name of its attention"
    return None


def _attentions(module: nn.Module) -> set[str | None]:
    """What the parts of a module call their attention."""
    configs = (getattr(part, "config", None) for part in module.modules())
    return {getattr(config, "_attn_implementation", None) for config in configs if config is not None}


@torch.no_grad()
def _replaced_norms(module: nn.Module) -> list[tuple[nn.Module, Any]]:
    """The norms whose formula is known, each with its forward as one kernel."""
    found = []
    for part in module.modules():
        # A forward that was set on the instance would be lost.
        if type(part).__name__.endswith("RMSNorm") and "forward" not in vars(part):
            with suppress(UnsupportedModelError):
                forward = partial(_normed, Norm.of(part), part, part.forward)
                if _is_same_norm(part, forward):
                    found.append((part, forward))
    return found


def _normed(norm: Norm, part: Any, forward: Any, hidden_states: Tensor, *args: Any, **options: Any) -> Tensor:
    if args or options or hidden_states.dtype != part.weight.dtype:
        normed: Tensor = forward(hidden_states, *args, **options)
        return normed
    return rms_norm(hidden_states, replace(norm, weight_E=part.weight))


def _is_same_norm(part: Any, forward: Any) -> bool:
    """Compared with the module's own, on numbers of its width."""
    if part.weight.ndim != 1:
        return False
    generator = torch.Generator().manual_seed(0)
    x_ME = torch.randn(4, len(part.weight), generator=generator).to(part.weight)
    found, expected = forward(x_ME), part.forward(x_ME)
    if found.dtype != expected.dtype:
        return False
    error = NORM_ROUNDINGS * torch.finfo(expected.dtype).eps
    return torch.allclose(found.float(), expected.float(), rtol=error, atol=error)


AttentionInterface.register(NAME, one_query_attention)
# The module makes the same masks.
AttentionMaskInterface.register(NAME, sdpa_mask)
