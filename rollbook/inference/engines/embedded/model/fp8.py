"""Keys and values as 8-bit floats (float8_e4m3fn): each vector, of a token and a head, has an exponent of its own.

A vector is scaled by a power of two, so that its largest number is between 128 and 256 (the format ends at 448), and the scale is
one byte. Nothing is calibrated, no vector is written twice, and products with the scale are exact: reading loses nothing.
"""

# N blocks, H key/value heads, B tokens a block, D head size

import torch
from torch import Tensor

STORED = torch.uint8
"""The dtype of a cache whose vectors are D numbers and an exponent."""
EXPONENT_BYTES = 1
_BITS_OF_FRACTION, _BIAS, _LARGEST = 23, 127, 7
_EXPONENTS = 8, 254
"""As in float32. Those of smaller vectors have no inverse; the larger one is of infinities."""


def encoded(vectors: Tensor) -> Tensor:
    """Vectors (..., D) as bytes (..., D + 1): the numbers, then the exponent of the largest as float32 has it."""
    exponents = vectors.abs().amax(dim=-1, keepdim=True).float().view(torch.int32) >> _BITS_OF_FRACTION
    exponents = exponents.clamp(*_EXPONENTS)
    scaled = vectors.float() * _power_of_two(_BIAS + _LARGEST - exponents)
    return torch.cat((scaled.to(torch.float8_e4m3fn).view(STORED), exponents.to(STORED)), dim=-1)


def decoded(stored: Tensor, dtype: torch.dtype) -> Tensor:
    """The inverse of `encoded`."""
    numbers = stored[..., :-EXPONENT_BYTES].view(torch.float8_e4m3fn)
    exponents = stored[..., -EXPONENT_BYTES:].to(torch.int32)
    return numbers.to(dtype) * _power_of_two(exponents - _BIAS - _LARGEST).to(dtype)


def parts_of_blocks(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Views of blocks (N, 2, H, B, D + 1): numbers (N, 2, H, B, D) and exponents (N, 2, H, B, 1). The exponents of a block follow
    its numbers, which are aligned like this."""
    *outer, size, width = (*blocks.shape[:4], blocks.shape[4] - EXPONENT_BYTES)
    lines, end = blocks.flatten(3), size * width
    return lines[..., :end].view(*outer, size, width), lines[..., end:].view(*outer, size, EXPONENT_BYTES)


def _power_of_two(exponents: Tensor) -> Tensor:
    return ((exponents + _BIAS) << _BITS_OF_FRACTION).view(torch.float32)
