"""What a sandbox of this machine is started with."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rollbook.sandbox.sandbox import Image, Limits


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxPlan:
    """A sandbox that is to be started on this machine: what was asked for, and what every kind derives from it."""

    kind: str
    image: Image
    limits: Limits
    network: bool = False
    """It shares the network of this machine."""
    env: Mapping[str, str]
    """Of all commands."""
    mounts: Mapping[str, Path] = field(default_factory=dict)
    """What is read-only inside, from which path of this machine."""
    others: Sequence[str] = ()
    """What is mounted besides."""
    kill_watch: tuple[Any, ...] | None = None
    """For `reports_kill`: the source of `kill_watch.py` and its setting."""

    @property
    def links(self) -> dict[str, str]:
        """The mounts that are symbolic links, with their targets."""
        return {path: str(source.readlink()) for path, source in self.mounts.items() if source.is_symlink()}

    @property
    def facts(self) -> dict[str, object]:
        if self.kind == "none":
            return {"kind": "none", "network": "host", "seccomp": False, "limits": {}}
        network = "host" if self.network else "none"
        return {"kind": self.kind, "network": network, "seccomp": True, "limits": asdict(self.limits)}
