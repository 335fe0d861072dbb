"""Records the settings each step was trained with, and refuses to replay steps with other settings.

Steps after the last checkpoint are trained again after a crash. With changed settings, the replayed weights would silently differ
from those that were published and sampled from. How a step is split into passes may change: its split is in the ledger.

A step that does not fit into memory is trained with smaller passes. That is recorded before the second attempt: a trainer that is
killed between both begins with the smaller passes, and ends with the same bits.
"""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rollbook.contracts.batch import PassSplit
from rollbook.contracts.errors import RunError
from rollbook.contracts.policy import SamplerExactness
from rollbook.numerics.machine import differences
from rollbook.trainer.config import SPLIT_SETTINGS, effective_exactness
from rollbook.trainer.files.atomic_files import write_text_atomically
from rollbook.trainer.memory_errors import StepMemoryError

LATER_SETTINGS = {
    "optimizer": "adamw",
    "optimizer_state": "device",
    "ppo_epochs": 1,
    "observation_coef": 0.0,
    "distill_coef": 0.0,
    "distill_kl": "sampled",
    "router_replay": False,
    "exactness": "fast",
}
"""Numeric settings that earlier versions did not record, with the values that they trained with."""
SMALLER_STEPS = 50
"""For this many steps smaller passes are kept, then the settings are tried again: a batch may have been unusually long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingsPeriod:
    """Steps after `after_step`, up to the next period, were trained with these settings."""

    after_step: int
    settings: dict[str, Any]
    changes_bits: list[str] = field(default_factory=list)
    """Settings of the split that changed at the start of the period."""
    machine: dict[str, str] = field(default_factory=dict)
    """`machine_of_bits` of the trainer; empty in runs of earlier versions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedAttempt:
    """An attempt to train a step that did not fit into memory."""

    step: int
    failed: PassSplit
    retried: PassSplit | None
    """The split of the next attempt; None: there is none."""
    cause: str

    @classmethod
    def read(cls, found: dict[str, Any]) -> "FailedAttempt":
        failed, retried = (None if found[name] is None else PassSplit(**found[name]) for name in ("failed", "retried"))
        assert failed is not None
        return cls(step=int(found["step"]), failed=failed, retried=retried, cause=str(found["cause"]))


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingsHistory:
    """`trainer_state.json` of a run: the digest of the initial weights, the settings over time, and attempts that failed."""

    initial_digest: str | None = None
    periods: tuple[SettingsPeriod, ...] = field(default_factory=tuple)
    out_of_memory: tuple[FailedAttempt, ...] = field(default_factory=tuple)
    sampler: SamplerExactness | None = None
    """What the policy servers said last of their logprobs."""

    @classmethod
    def read(cls, path: Path) -> "SettingsHistory":
        """Read the file; empty for a new run."""
        if not path.exists():
            return cls()
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            periods = tuple(
                SettingsPeriod(
                    after_step=int(p["after_step"]),
                    settings=_effective({**LATER_SETTINGS, **p["settings"]}),
                    changes_bits=list(p.get("changes_bits", ())),
                    machine=dict(p.get("machine", {})),
                )
                for p in found["periods"]
            )
            attempts = tuple(FailedAttempt.read(attempt) for attempt in found.get("out_of_memory", ()))
            said = found.get("sampler")
            return cls(
                initial_digest=found["initial_digest"],
                periods=periods,
                out_of_memory=attempts,
                sampler=None if said is None else SamplerExactness(**said),
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise RunError(
                f"{path} cannot be read ({error!r}). Restore it, or start in a new run directory."
            ) from error

    def write(self, path: Path) -> None:
        write_text_atomically(path, json.dumps(asdict(self), indent=1) + "\n")

    def changed(self, settings: dict[str, Any], *, restored_step: int, acknowledged_step: int) -> list[str]:
        """Settings that differ from those of any step to be replayed (restored+1 .. acknowledged), without those of the split."""
        names: set[str] = set()
        ends = [*(period.after_step for period in self.periods[1:]), acknowledged_step]
        for period, end in zip(self.periods, ends, strict=False):
            last = min(end, acknowledged_step)
            if max(period.after_step, restored_step) < last:
                keys = (period.settings.keys() | settings.keys()) - set(SPLIT_SETTINGS)
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

    def other_machines(self, machine: dict[str, str], *, until: int) -> list[str]:
        """How the machines that trained the steps up to `until` differ from this one, in words."""
        found = []
        for period in self.periods:
            others = differences(machine, period.machine)
            if others and period.after_step < until:
                found.append(f"the steps after {period.after_step} were trained with {', '.join(others)}")
        return found

    def resumed(
        self, settings: dict[str, Any], *, acknowledged_step: int, machine: dict[str, str] | None = None
    ) -> "SettingsHistory":
        """The history after a resume with `settings`. Unchanged settings on the same machine start no new period.

        Another split is tried for the next steps, whatever failed before.
        """
        machine = machine or {}
        if self.periods and (self.periods[-1].settings, self.periods[-1].machine) == (settings, machine):
            return self
        before = self.periods[-1].settings if self.periods else settings
        changes_bits = [name for name in SPLIT_SETTINGS if before.get(name) != settings.get(name)]
        kept = tuple(period for period in self.periods if period.after_step < acknowledged_step)
        added = SettingsPeriod(
            after_step=acknowledged_step, settings=settings, changes_bits=changes_bits, machine=machine
        )
        return replace(self, periods=(*kept, added), out_of_memory=() if changes_bits else self.out_of_memory)


def _effective(settings: dict[str, Any]) -> dict[str, Any]:
    """The values that decided the numbers of a step, as `TrainerConfig.numeric_settings` has them."""
    return {**settings, "exactness": effective_exactness(settings)}


def split_settings(split: PassSplit) -> dict[str, Any]:
    """The settings of the trainer that have this split."""
    return dict(zip(SPLIT_SETTINGS, (split.max_tokens, split.checkpointing), strict=True))


class PassSplits:
    """The split of each step: that of the settings, or a smaller one after an attempt that did not fit into memory."""

    def __init__(
        self, path: Path, default: PassSplit, *, on_default: Callable[[PassSplit], None] = lambda split: None
    ) -> None:
        """`on_default` is called with the split of `begin_with`."""
        self._path = path
        self._default = default
        self._on_default = on_default
        self._attempts = SettingsHistory.read(path).out_of_memory

    def of(self, step: int, *, recorded: PassSplit | None = None) -> PassSplit:
        """`recorded`: the split with which an earlier trainer acknowledged the step."""
        tried = [attempt for attempt in self._attempts if attempt.step <= step < attempt.step + SMALLER_STEPS]
        if tried and tried[-1].retried is not None and (recorded is None or tried[-1].step == step):
            return tried[-1].retried
        return recorded or self._default

    def begin_with(self, split: PassSplit) -> None:
        """Use another default, as if the settings had it from the start. Before the first step."""
        self._default = split
        history = SettingsHistory.read(self._path)
        if history.periods:
            last = history.periods[-1]
            settings = {**last.settings, **split_settings(split)}
            replace(history, periods=(*history.periods[:-1], replace(last, settings=settings))).write(self._path)
        self._on_default(split)

    def failed(self, step: int) -> list[FailedAttempt]:
        return [attempt for attempt in self._attempts if attempt.step == step]

    def add(self, failure: StepMemoryError) -> None:
        """Record it on disk: a trainer that is killed before the next attempt must train the step as this one would.

        Step 0 is the trial before the first step.
        """
        if failure.step > 0:
            attempt = FailedAttempt(
                step=failure.step, failed=failure.failed, retried=failure.smaller, cause=str(failure)
            )
            self._write((*self._attempts, attempt))
        elif failure.smaller is not None:
            self.begin_with(failure.smaller)

    def take_last_failure(self, step: int) -> FailedAttempt | None:
        """An attempt after which there was nothing smaller to try. It is removed: after this report, the run may be resumed."""
        found = next((attempt for attempt in self.failed(step) if attempt.retried is None), None)
        if found is not None:
            self._write(tuple(attempt for attempt in self._attempts if attempt is not found))
        return found

    def _write(self, attempts: tuple[FailedAttempt, ...]) -> None:
        replace(SettingsHistory.read(self._path), out_of_memory=attempts).write(self._path)
        self._attempts = attempts


def check_and_record(
    path: Path,
    settings: dict[str, Any],
    *,
    restored_step: int,
    acknowledged_step: int,
    weights_digest: str,
    machine: dict[str, str] | None = None,
) -> list[str]:
    """Record the settings and the machine. Raises `RunError` where a replay would give other weights than the run had.

    `weights_digest` is the digest of the restored weights. Returns what may change the bits of the steps that are trained again.
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
    others = []
    if restored_step < acknowledged_step:
        others = history.other_machines(machine or {}, until=acknowledged_step)
    resumed = history.resumed(settings, acknowledged_step=acknowledged_step, machine=machine)
    replace(resumed, initial_digest=initial).write(path)
    return others
