"""Published weights: their digest, used by publisher and receiver, and low-rank adapters.

Of an adapter only its matrices are published; the base model does not change.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import xxhash

from rollbook.contracts.policy import PublicationId

PREFIX = "policy-v"
DTYPE_NAMES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}
"""The name of a dtype in safetensors, by its name in torch."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """Metadata of an adapter. Its tensors are transferred like weights, under PEFT's names."""

    name: str
    """Contains the publication id, so no cache can confuse two adapters."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The content of PEFT's `adapter_config.json`."""
    base_digest: str | None = None
    """Digest of the base weights it was trained with; None if unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterKind:
    """The part that all adapters of one trainer share."""

    settings: Mapping[str, Any]
    base_digest: str

    def published(self, publication: PublicationId) -> Adapter:
        name = adapter_name(publication)
        return Adapter(name=name, settings=self.settings, base_digest=self.base_digest)


def adapter_name(publication: PublicationId) -> str:
    """The name of a published adapter. Unique, because publication ids are never reused."""
    return f"{PREFIX}{publication}"


def named_publication(name: str) -> int | None:
    """The publication id in an adapter's name; None if it is not such a name."""
    number = name.removeprefix(PREFIX)
    return int(number) if number != name and number.isascii() and number.isdigit() else None
