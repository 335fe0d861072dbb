"""The floating-point operations of a training step, the peak rate of the devices (for MFU), and their peak memory."""

import resource
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rollbook.trainer.config import TrainerConfig
from rollbook.trainer.data.passes import Microbatch
from rollbook.trainer.model.packed_delta import delta_parts

# Dense bfloat16 operations per second, from the vendors' data sheets. Longest name first: "H100" is part of "H100 PCIe".
PEAK_FLOPS = {
    "B200": 2250e12,
    "GH200": 989e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "A10G": 70e12,
    "L4": 121e12,
    "4090": 165e12,
}

CHOSEN_EXPERTS = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts")
ALL_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Names of these numbers in configurations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The dimensions of a model that decide its number of operations and its learning rate."""

    body_parameters: int
    """Parameters that a token uses: all but the embeddings, and of the experts those that are chosen."""
    frozen_parameters: int
    """Those of them that are not trained."""
    head_parameters: int
    """The output embedding, used by trained tokens only."""
    is_head_frozen: bool
    attention_layers: int
    attention_width: int
    """Number of heads times head width."""
    width: int
    """Width of the residual stream."""

    @classmethod
    def of(cls, module: Any) -> "ModelShape":
        config = first_layer_config(module.config)
        head, embedding = module.get_output_embeddings().weight, module.get_input_embeddings().weight
        # A model with recurrent states only has no heads.
        heads = getattr(config, "num_attention_heads", None) or 0
        width = getattr(config, "head_dim", None) or (config.hidden_size // heads if heads else 0)
        used = _chosen_experts(config)
        body = [
            (parameter, parameter.numel() * (used if ".experts." in name else 1.0))
            for name, parameter in module.named_parameters()
            if parameter is not head and parameter is not embedding
        ]
        return cls(
            body_parameters=round(sum(count for _, count in body)),
            frozen_parameters=round(sum(count for parameter, count in body if not parameter.requires_grad)),
            head_parameters=head.numel(),
            is_head_frozen=not head.requires_grad,
            attention_layers=config.num_hidden_layers - sum(1 for _ in delta_parts(module)),
            attention_width=heads * width,
            width=config.hidden_size,
        )


def first_layer_config(config: Any) -> Any:
    """Heads may differ between layers; the first stands for all. Older versions of transformers have one configuration for all."""
    text = config.get_text_config()
    return next(iter(getattr(text, "per_layer_config", None) or [text]))


def _chosen_experts(config: Any) -> float:
    """The share of the experts that computes a token; 1 if it is unknown."""
    chosen, experts = (
        next((count for name in names if (count := getattr(config, name, None))), None)
        for names in (CHOSEN_EXPERTS, ALL_EXPERTS)
    )
    return chosen / experts if chosen and experts else 1.0


def training_flops(passes: Sequence[Microbatch], shape: ModelShape) -> float:
    """Forward and backward: 6 operations per parameter and token; causal attention 6 per pair of tokens and channel.

    4 for a frozen parameter: the gradient of its inputs is computed, its own is not.
    """
    of_body = 6.0 * shape.body_parameters - 2.0 * shape.frozen_parameters
    of_head = (4.0 if shape.is_head_frozen else 6.0) * shape.head_parameters
    total = 0.0
    for micro in passes:
        tokens = micro.inputs_BT.size - micro.num_padding
        total += of_body * tokens + of_head * micro.num_trained
        total += 6.0 * shape.attention_layers * shape.attention_width * _attention_pairs(micro)
    return total


def _attention_pairs(micro: Microbatch) -> float:
    """Twice the pairs of a token and an earlier one. Pairs of shared tokens count once, where they are computed."""
    if micro.sequences is None:
        return float(micro.inputs_BT.size * micro.inputs_BT.shape[1])
    lengths, added = (np.array(counts, dtype=np.float64) for counts in (micro.sequences.lengths, micro.sequences.added))
    return float((np.square(lengths) - np.square(lengths - added)).sum())


def peak_flops(device_name: str) -> float | None:
    """None where the peak is unknown (a CPU, an unlisted GPU); then no utilisation is reported."""
    return next((peak for name, peak in PEAK_FLOPS.items() if name in device_name), None)


def devices_peak_flops(config: TrainerConfig) -> float | None:
    """Sum over the training devices; None where the peak is unknown for the device or the precision."""
    if config.device != "cuda" or config.compute_dtype != "bfloat16":
        return None
    one = peak_flops(torch.cuda.get_device_name())
    return None if one is None else one * config.ranks


def peak_memory_gb(device: str) -> float:
    """Peak memory of tensors on a GPU, or of this process on a CPU."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated() / 1e9
    # Kilobytes everywhere but on macOS.
    unit = 1.0 if sys.platform == "darwin" else 1024.0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9
