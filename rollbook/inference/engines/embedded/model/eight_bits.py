"""Numbers with 8 bits: keys and values in the cache, and products of projections.

**Keys and values**: each vector, of a token and a head, is scaled by a power of two, so that its largest number is near the end of
the format, and the exponent is one byte. Nothing is calibrated, no vector is written twice, and products with the scale are exact:
reading loses nothing.

**Products** (float8_e4m3fn): each output of a weight has a scale, and so has each token. The weights in the model's dtype stay:
updates, digests and adapters use them, and the copies here are computed again from them.
"""

# N blocks, H key/value heads, B tokens a block, D head size, M tokens, E inputs and O outputs of a projection

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

FP8, INT8 = torch.uint8, torch.int8
"""The dtypes of caches whose vectors are D numbers and an exponent: numbers are float8_e4m3fn, or integers."""
FORMATS = {"fp8": FP8, "int8": INT8}
LARGEST = {FP8: 7, INT8: 6}
"""The exponent to which the largest number of a vector is scaled: below 256 (floats end at 448), or below 128."""
EXPONENT_BYTES = 1
FP8_MULTIPLE = 16
"""Inputs and outputs of a projection must be multiples of it."""
FP8_LARGEST, SMALLEST_SCALE = torch.finfo(torch.float8_e4m3fn).max, 1e-12
"""The end of the format, and the scale of a line of zeros."""
_BITS_OF_FRACTION, _BIAS = 23, 127
_EXPONENTS = 8, 254
"""The range of exponents, as in float32. Smaller ones have no inverse; the next larger one stands for infinity."""

Scaled = tuple[Tensor, Tensor]
"""Lines (M, E) as 8-bit floats, and their scales (M, 1) in float32."""


def encoded(vectors: Tensor, stored: torch.dtype) -> Tensor:
    """Vectors (..., D) as bytes (..., D + 1): the numbers, then the exponent of the largest as float32 has it."""
    exponents = vectors.abs().amax(dim=-1, keepdim=True).float().view(torch.int32) >> _BITS_OF_FRACTION
    exponents = exponents.clamp(*_EXPONENTS)
    scaled = vectors.float() * _power_of_two(_BIAS + LARGEST[stored] - exponents)
    numbers = scaled.to(torch.float8_e4m3fn) if stored is FP8 else (scaled + 0.5).floor().clamp(max=127).to(INT8)
    return torch.cat((numbers.view(torch.uint8), exponents.to(torch.uint8)), dim=-1).view(stored)


def decoded(read: Tensor, dtype: torch.dtype) -> Tensor:
    """The inverse of `encoded`."""
    numbers = read[..., :-EXPONENT_BYTES]
    exponents = read[..., -EXPONENT_BYTES:].view(torch.uint8).to(torch.int32)
    if read.dtype is FP8:
        numbers = numbers.view(torch.float8_e4m3fn)
    return numbers.to(dtype) * _power_of_two(exponents - _BIAS - LARGEST[read.dtype]).to(dtype)


def parts_of_blocks(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Views of blocks (N, 2, H, B, D + 1): numbers (N, 2, H, B, D) and exponents (N, 2, H, B, 1). The exponents of a block follow
    its numbers, which are aligned like this."""
    *outer, size, width = (*blocks.shape[:4], blocks.shape[4] - EXPONENT_BYTES)
    lines, end = blocks.flatten(3), size * width
    return lines[..., :end].view(*outer, size, width), lines[..., end:].view(*outer, size, EXPONENT_BYTES)


def _power_of_two(exponents: Tensor) -> Tensor:
    return ((exponents + _BIAS) << _BITS_OF_FRACTION).view(torch.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Weight:
    weight_OE: Tensor
    """What is copied."""
    numbers_OE: Tensor
    scales_O1: Tensor

    @classmethod
    def of(cls, weight_OE: Tensor) -> "Fp8Weight":
        scales_O1 = torch.empty((len(weight_OE), 1), dtype=torch.float32, device=weight_OE.device)
        numbers_OE = torch.empty_like(weight_OE, dtype=torch.float8_e4m3fn)
        return cls(weight_OE=weight_OE, numbers_OE=numbers_OE, scales_O1=scales_O1)

    def renew(self, scaled: Callable[[Tensor], Scaled]) -> None:
        """Copy the weight again, to the same addresses: captured steps read them."""
        numbers_OE, scales_O1 = scaled(self.weight_OE)
        self.numbers_OE.copy_(numbers_OE)
        self.scales_O1.copy_(scales_O1)

    def product(self, x: Scaled, bias_O: Tensor | None, dtype: torch.dtype) -> Tensor:
        numbers_ME, scales_M1 = x
        by_row = F.ScalingType.RowWise
        return F.scaled_mm(
            numbers_ME,
            self.numbers_OE.t(),
            scales_M1,
            by_row,
            self.scales_O1.t(),
            by_row,
            bias=bias_O,
            output_dtype=dtype,
        )


def scaled_lines(x_ME: Tensor) -> Scaled:
    """The largest number of each line becomes the largest of the format."""
    wide_ME = x_ME.float()
    scales_M1 = (wide_ME.abs().amax(dim=1, keepdim=True) / FP8_LARGEST).clamp(min=SMALLEST_SCALE)
    return (wide_ME / scales_M1).to(torch.float8_e4m3fn), scales_M1


def why_no_products(device: torch.device, dtype: torch.dtype, weights: list[Tensor]) -> str | None:
    """Why such products cannot be computed here; None if they can."""
    if not hasattr(F, "scaled_mm"):
        return f"PyTorch {torch.__version__} has no torch.nn.functional.scaled_mm; 2.10 has"
    if device.type == "cuda" and dtype is not torch.bfloat16:
        return "it needs bfloat16 (inference.dtype) on a GPU"
    sizes = sorted({size for weight in weights for size in weight.shape if size % FP8_MULTIPLE})
    return (
        f"sizes of its projections are no multiples of {FP8_MULTIPLE}: {', '.join(map(str, sizes))}" if sizes else None
    )
