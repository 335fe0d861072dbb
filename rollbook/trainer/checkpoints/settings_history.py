"""Records the settings each step was trained with, and refuses to replay steps with other settings.

Steps after the last checkpoint are trained again after a crash. With changed settings, the replayed weights would silently differ
from those that were published and sampled from.
"""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rollbook.contracts.errors import RunError
from rollbook.trainer.files.atomic_files import write_text_atomically


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingsPeriod:
    """Steps after `after_step`, up to the next period, were trained with these settings."""

    after_step: int
    settings: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingsHistory:
    """`trainer_state.json` of a run: the digest of the initial weights, and the settings over time."""

    initial_digest: str | None = None
    periods: tuple[SettingsPeriod, ...] = field(default_factory=tuple)

    @classmethod
    def read(cls, path: Path) -> "SettingsHistory":
        """Read the file; empty for a new run."""
        if not path.exists():
            return cls()
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            periods = tuple(
                SettingsPeriod(after_step=int(p["after_step"]), settings=dict(p["settings"])) for p in found["periods"]
            )
            return cls(initial_digest=found["initial_digest"], periods=periods)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise RunError(
                f"{path} cannot be read ({error!r}). Restore it, or start in a new run directory."
            ) from error

    def write(self, path: Path) -> None:
        write_text_atomically(path, json.dumps(asdict(self), indent=1) + "\n")

    def changed(self, settings: dict[str, Any], *, restored_step: int, acknowledged_step: int) -> list[str]:
        """Settings that differ from those of any step to be replayed (restored+1 .. acknowledged)."""
        names: set[str] = set()
        ends = [*(period.after_step for period in self.periods[1:]), acknowledged_step]
        for period, end in zip(self.periods, ends, strict=False):
            last = min(end, acknowledged_step)
            if max(period.after_step, restored_step) < last:
                keys = period.settings.keys() | settings.keys()
                names |= {key for key in keys if period.settings.get(key) != settings.get(key)}
        return sorted(names)

    def changes(self) -> dict[int, dict[str, tuple[Any, Any]]]:
        """For each later period the settings that changed, with both values, by the last step before the change."""
        pairs = zip(self.periods, self.periods[1:], strict=False)
        return {
            after.after_step: {
                name: (before.settings.get(name), after.settings.get(name))
                for name in sorted(before.settings.keys() | after.settings.keys())
                if before.settings.get(name) != after.settings.get(name)
            }
            for before, after in pairs
        }

    def resumed(self, settings: dict[str, Any], *, acknowledged_step: int) -> "SettingsHistory":
        """The history after a resume with `settings`. Unchanged settings start no new period."""
        if self.periods and self.periods[-1].settings == settings:
            return self
        kept = tuple(period for period in self.periods if period.after_step < acknowledged_step)
        added = SettingsPeriod(after_step=acknowledged_step, settings=settings)
        return SettingsHistory(initial_digest=self.initial_digest, periods=(*kept, added))


def check_and_record(
    path: Path, settings: dict[str, Any], *, restored_step: int, acknowledged_step: int, weights_digest: str
) -> None:
    """Record the settings. Raises `RunError` where a replay would give other weights than the run had.

    `weights_digest` is the digest of the restored weights.
    """
    history = SettingsHistory.read(path)
    changed = history.changed(settings, restored_step=restored_step, acknowledged_step=acknowledged_step)
    if changed:
        raise RunError(
            f"steps {restored_step + 1} to {acknowledged_step} must be trained again, but these trainer settings changed since:"
            f" {', '.join(changed)}. Restore them, or start a new run. Settings may change after a checkpoint."
        )
    if restored_step == 0 and history.initial_digest not in (None, weights_digest):
        raise RunError(
            f"the initial weights have digest {weights_digest}, but this run started with {history.initial_digest}."
            " Restore the model directory, or start a new run."
        )
    initial = weights_digest if restored_step == 0 else history.initial_digest
    periods = history.resumed(settings, acknowledged_step=acknowledged_step).periods
    SettingsHistory(initial_digest=initial, periods=periods).write(path)
