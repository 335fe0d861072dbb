"""The averages of AdamW with 8 bits: torchao's dynamic map, and a scale for each block of 256 numbers. Extra `quantized`."""

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torchao.optim.quant_utils import create_dynamic_map, dequant_with_qmap, quantize_8bit_with_qmap, scale_tensor

from rollbook.trainer.optimizer_state.chunked_adamw import AVERAGES, WeightRange, require_names

BLOCK = 256
LEAST_QUANTISED = 4096
"""Numbers of a weight. Smaller ones, norms above all, keep float32: their share of the memory is small, and their error is not."""
SCALE = "_scale"
"""After the name of an average: the scales of its blocks. The codes have the name of the average, and the shape of the weight."""
SIGNED = {"exp_avg": True, "exp_avg_sq": False}


class EightBitStorage:
    """Satisfies `StateStorage`. The state is made of plain tensors, so checkpoints need no type of torchao."""

    is_remote = False

    def new(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        if parameter.numel() < LEAST_QUANTISED:
            return {name: torch.zeros_like(parameter, requires_grad=False) for name in AVERAGES}
        blocks = -(-parameter.numel() // BLOCK)
        held = {}
        for name in AVERAGES:
            held[name] = torch.zeros_like(parameter, dtype=torch.uint8, requires_grad=False)
            held[name + SCALE] = torch.zeros(blocks, device=parameter.device)
        return held

    def adopted(self, parameter: nn.Parameter, saved: Mapping[str, Tensor]) -> dict[str, Tensor]:
        is_quantised = parameter.numel() >= LEAST_QUANTISED
        names = (*AVERAGES, *(name + SCALE for name in AVERAGES)) if is_quantised else AVERAGES
        require_names(saved, names)
        return {name: saved[name].to(parameter.device, copy=True) for name in names}

    def read(self, held: Mapping[str, Tensor], name: str, piece: WeightRange, into: Tensor) -> None:
        codes = piece.of(held[name])
        if name + SCALE not in held:
            into.copy_(codes)
            return
        scale, qmap = held[name + SCALE][_blocks(piece)].detach(), _qmap(codes.device, is_signed=SIGNED[name])
        whole = _for_device(dequant_with_qmap, codes.device)(_padded(codes), qmap, scale)
        into.copy_(whole[: len(codes)])

    def write(self, held: Mapping[str, Tensor], name: str, piece: WeightRange, values: Tensor) -> None:
        stored = piece.of(held[name])
        if name + SCALE not in held:
            stored.copy_(values)
            return
        qmap = _qmap(values.device, is_signed=SIGNED[name])
        codes, scale = _for_device(_quantised, values.device)(_padded(values), qmap)
        stored.copy_(codes[: len(stored)])
        held[name + SCALE][_blocks(piece)] = scale


def _quantised(values: Tensor, qmap: Tensor) -> tuple[Tensor, Tensor]:
    scaled, scale = scale_tensor(values, BLOCK)
    return quantize_8bit_with_qmap(scaled, qmap), scale


def _blocks(piece: WeightRange) -> slice:
    """Pieces begin at a block."""
    return slice(piece.start // BLOCK, -(-piece.stop // BLOCK))


def _padded(values: Tensor) -> Tensor:
    """To whole blocks. Detached, because compiled code is only valid for one relation of a view's size to its base's size."""
    return torch.nn.functional.pad(values, (0, -len(values) % BLOCK)) if len(values) % BLOCK else values.detach()


@cache
def _qmap(device: torch.device, *, is_signed: bool) -> Tensor:
    return torch.tensor(create_dynamic_map(signed=is_signed), device=device)


@cache
def _compiled(function: Any) -> Any:
    return torch.compile(function, dynamic=True)


def _for_device(function: Any, device: torch.device) -> Any:
    """On a GPU these functions only read and write memory: compiled they do so once, and not at each of some 30 operations."""
    return _compiled(function) if device.type == "cuda" else function
