"""Keys and values with 8 bits a number: each vector, of a token and a head, has an exponent of its own.

A vector is scaled by a power of two, so that its largest number is near the end of the format, and the scale is one byte. Nothing
is calibrated, no vector is written twice, and products with the scale are exact: reading loses nothing.
"""

# N blocks, H key/value heads, B tokens a block, D head size

import torch
from torch import Tensor

FP8, INT8 = torch.uint8, torch.int8
"""The dtypes of caches whose vectors are D numbers and an exponent: numbers are float8_e4m3fn, or integers."""
FORMATS = {"fp8": FP8, "int8": INT8}
LARGEST = {FP8: 7, INT8: 6}
"""The exponent to which the largest number of a vector is scaled: below 256 (floats end at 448), or below 128."""
EXPONENT_BYTES = 1
_BITS_OF_FRACTION, _BIAS = 23, 127
_EXPONENTS = 8, 254
"""The range of exponents, as in float32. Smaller ones have no inverse; the next larger one stands for infinity."""


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
