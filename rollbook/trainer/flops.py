"""How much arithmetic a step asks for, and what part of the device's peak that is (MFU)."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rollbook.trainer.data.minibatches import Microbatch

# Dense bfloat16 operations per second, as their makers state them. Longest name first: "H100" is part of "H100 PCIe".
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """What of a model decides its arithmetic."""

    body_parameters: int
    """Those every token goes through: all but the embeddings."""
    head_parameters: int
    """The output embedding, which trained tokens alone go through."""
    layers: int
    attention_width: int
    """Heads times the width of a head."""


def training_flops(passes: Sequence[Microbatch], shape: ModelShape) -> float:
    """Forward and backward: 6 operations for a parameter and a token; causal attention 6 for a pair of tokens and a width."""
    total = 0.0
    for micro in passes:
        lengths = np.array(
            micro.lengths if micro.lengths is not None else [micro.inputs_BT.shape[1]] * micro.inputs_BT.shape[0]
        )
        tokens = micro.inputs_BT.size - micro.num_padding
        total += 6.0 * shape.body_parameters * tokens + 6.0 * shape.head_parameters * micro.num_trained
        total += 6.0 * shape.layers * shape.attention_width * float(np.square(lengths, dtype=np.float64).sum())
    return total


def peak_flops(device_name: str) -> float | None:
    """None where the peak is not known (a CPU, another card): then no share of it is told."""
    return next((peak for name, peak in PEAK_FLOPS.items() if name in device_name), None)
