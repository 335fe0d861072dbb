"""Low-rank adapters as a publication: small matrices beside a base model that stands still."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rollbook.contracts.policy import PublicationId

PREFIX = "policy-v"


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """What says how the tensors of an adapter are meant. The tensors themselves travel as weights do, under PEFT's names."""

    name: str
    """Versioned: another adapter has another name, so that no cache can mistake one for the other."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """What PEFT keeps in `adapter_config.json`."""
    base_digest: str | None = None
    """Of the weights it was trained beside. None: whoever made it did not say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterKind:
    """What all adapters of one trainer have in common."""

    settings: Mapping[str, Any]
    base_digest: str

    def published(self, publication: PublicationId) -> Adapter:
        name = adapter_name(publication)
        return Adapter(name=name, settings=self.settings, base_digest=self.base_digest)


def adapter_name(publication: PublicationId) -> str:
    """The name of a published adapter. Publication ids are never reused, so neither are names."""
    return f"{PREFIX}{publication}"


def named_publication(name: str) -> int | None:
    """The publication behind a name; None for a name that nobody published under."""
    number = name.removeprefix(PREFIX)
    return int(number) if number != name and number.isascii() and number.isdigit() else None
