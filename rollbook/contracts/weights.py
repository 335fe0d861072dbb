"""The digest of a set of weights, computed the same way by whoever publishes and whoever receives."""

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
    """Covers names, dtypes, shapes and bytes, whatever order they come in. `dtype` as safetensors spells it (`F32`, `BF16`).

    It tells weights apart, it does not keep out forgers: a hash at the speed of memory, because every step is digested.
    """
    whole = xxhash.xxh3_128()
    for tensor in sorted(tensors, key=lambda t: t.name):
        head = f"{tensor.name}|{tensor.dtype}|{','.join(map(str, tensor.shape))}|"
        whole.update(head.encode())
        whole.update(tensor.data)
    return whole.hexdigest()
