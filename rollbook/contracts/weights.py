"""The digest of a set of weights, shared by trainer and replicas."""

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
    """Covers names, dtypes, shapes and bytes, independent of the order. `dtype` as safetensors spells it (`F32`, `BF16`).

    A fast hash, not a cryptographic one, because the weights of every step are digested.
    """
    digest = xxhash.xxh3_128()
    for tensor in sorted(tensors, key=lambda t: t.name):
        header = f"{tensor.name}|{tensor.dtype}|{','.join(map(str, tensor.shape))}|"
        digest.update(header.encode())
        digest.update(tensor.data)
    return digest.hexdigest()
