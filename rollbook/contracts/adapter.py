"""Low-rank adapters as publications: only the adapter's matrices are published, the base model does not change."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rollbook.contracts.policy import PublicationId

PREFIX = "policy-v"


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
