"""The digest of a set of weights, used by publisher and receiver."""

from collections.abc import Iterable
from typing import Protocol

import xxhash


class RawTensor(Protocol):
    """A named tensor as plain bytes in row-major order."""

    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def data(self) -> bytes | memoryview: ...


def weights_digest(tensors: Iterable[RawTensor]) -> str:
    """Covers names, dtypes (safetensors names such as `F32`, `BF16`), shapes and bytes, independent of the order.

    A fast hash, because every step is digested; it does not protect against forgery.
    """
    digest = xxhash.xxh3_128()
    for tensor in sorted(tensors, key=lambda t: t.name):
        header = f"{tensor.name}|{tensor.dtype}|{','.join(map(str, tensor.shape))}|"
        digest.update(header.encode())
        digest.update(tensor.data)
    return digest.hexdigest()
