"""Which settings each step was trained with, kept beside the checkpoints, so that a replay is never made with others unnoticed.

Steps behind the last checkpoint are trained again after a crash. If what decides their numbers has changed meanwhile, the weights
would silently be others than those that were published and sampled from.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollbook.contracts.errors import RunError
from rollbook.trainer.files.atomic_files import write_text_atomically


@dataclass(frozen=True, slots=True, kw_only=True)
class Era:
    """Steps after `after_step`, up to the next era, were trained with these settings."""

    after_step: int
    settings: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingsHistory:
    """`trainer_state.json` of a run: digest of the initial weights, and the eras."""

    initial_digest: str | None = None
    eras: tuple[Era, ...] = field(default_factory=tuple)

    @classmethod
    def read(cls, path: Path) -> "SettingsHistory":
        """Empty where there is none: the run is new."""
        if not path.exists():
            return cls()
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            eras = tuple(Era(after_step=int(e["after_step"]), settings=dict(e["settings"])) for e in found["eras"])
            return cls(initial_digest=found["initial_digest"], eras=eras)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise RunError(
                f"{path} cannot be read ({error!r}). Restore it, or begin in a new run directory."
            ) from error

    def write(self, path: Path) -> None:
        told = {
            "initial_digest": self.initial_digest,
            "eras": [{"after_step": era.after_step, "settings": era.settings} for era in self.eras],
        }
        write_text_atomically(path, json.dumps(told, indent=1) + "\n")

    def changed(self, settings: dict[str, Any], *, restored_step: int, acknowledged_step: int) -> list[str]:
        """Names of settings that differ from those that any step to be replayed (restored+1 .. acknowledged) was trained with."""
        names: set[str] = set()
        ends = [*(era.after_step for era in self.eras[1:]), acknowledged_step]
        for era, end in zip(self.eras, ends, strict=False):
            last = min(end, acknowledged_step)
            if max(era.after_step, restored_step) < last:
                keys = era.settings.keys() | settings.keys()
                names |= {key for key in keys if era.settings.get(key) != settings.get(key)}
        return sorted(names)

    def resumed(self, settings: dict[str, Any], *, acknowledged_step: int) -> "SettingsHistory":
        """The history once this incarnation goes on with `settings`. Unchanged ones begin no new era."""
        if self.eras and self.eras[-1].settings == settings:
            return self
        kept = tuple(era for era in self.eras if era.after_step < acknowledged_step)
        return SettingsHistory(
            initial_digest=self.initial_digest, eras=(*kept, Era(after_step=acknowledged_step, settings=settings))
        )


def check_and_record(
    path: Path, settings: dict[str, Any], *, restored_step: int, acknowledged_step: int, weights_digest: str
) -> None:
    """Refuse to resume where a replay would give other weights than the run did; else write down what it goes on with.

    `weights_digest` is that of the restored weights.
    """
    history = SettingsHistory.read(path)
    changed = history.changed(settings, restored_step=restored_step, acknowledged_step=acknowledged_step)
    if changed:
        raise RunError(
            f"steps {restored_step + 1} to {acknowledged_step} must be trained again, and these trainer settings have changed since"
            f" they were trained: {', '.join(changed)}. Restore them, or begin a new run; they may change after a checkpoint."
        )
    if restored_step == 0 and history.initial_digest not in (None, weights_digest):
        raise RunError(
            f"the initial weights have digest {weights_digest}, but this run began with {history.initial_digest}."
            " Restore the model directory, or begin a new run."
        )
    initial = weights_digest if restored_step == 0 else history.initial_digest
    eras = history.resumed(settings, acknowledged_step=acknowledged_step).eras
    SettingsHistory(initial_digest=initial, eras=eras).write(path)
