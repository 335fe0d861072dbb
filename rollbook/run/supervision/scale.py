"""How many processes a run should have in addition to those of its plan. Written by `rollbook scale` and by the autoscaler."""

import json
from contextlib import suppress
from dataclasses import dataclass

from rollbook.run.config.cluster import ClusterConfig
from rollbook.run.directory import RunDirectory, write_json

ROLES = ("policy", "rollout", "env")


@dataclass(frozen=True, slots=True)
class Scale:
    policy: int = 0
    rollout: int = 0
    env: int = 0

    @classmethod
    def of_config(cls, config: ClusterConfig) -> "Scale":
        return cls(policy=config.policy, rollout=config.rollout, env=config.env)

    @classmethod
    def read(cls, directory: RunDirectory) -> "Scale | None":
        """The last request."""
        with suppress(OSError, ValueError, TypeError):
            return cls(**json.loads(directory.scale_file.read_text(encoding="utf-8")))
        return None

    def write(self, directory: RunDirectory) -> None:
        write_json(directory.scale_file, self.as_dict())

    def as_dict(self) -> dict[str, int]:
        return {role: self.of(role) for role in ROLES}

    def of(self, role: str) -> int:
        return int(getattr(self, role))
