"""The replay process: `python -m rollbook.run.processes.replay RUN [--until N]`. Prints JSON lines: its progress, then the
report or why it failed.

A verification writes nothing. Training with another loss writes curves and a plot to the output folder.
"""

import argparse
import asyncio
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rollbook.contracts.errors import RunError, is_out_of_memory
from rollbook.contracts.plugin import extend_search_path
from rollbook.dashboard.plots import draw_comparison
from rollbook.numerics.machine import machine_of_bits
from rollbook.run.config.checks import reward_weights_have_functions
from rollbook.run.config.replayed import changed_settings
from rollbook.run.config.resolved_settings import resolved_reward_weights
from rollbook.run.config.run import load_resolved_config
from rollbook.run.directory import RunDirectory, write_json
from rollbook.run.reader import RecordedRun, open_run
from rollbook.run.resources.shortage import replay_shortage
from rollbook.run.user_modules import recorded_modules
from rollbook.trainer.checkpoints.settings_history import SettingsHistory
from rollbook.trainer.config import TrainerConfig
from rollbook.trainer.replay import CounterfactualStep, ReplayedStep, ReplayPeriod, replay, replay_periods, retrain

MEASURES = {
    "gain": "gain over the sampler before training the batch: mean of A (log π − log μ)",
    "train/entropy": "entropy (nats)",
    "train/mean_kl": "divergence from the sampler (nats)",
    "train/ess": "effective sample size of the record (fraction of its tokens)",
    "train/grad_norm": "gradient norm",
    "train/ppo_clip_frac": "share of clipped tokens",
}


PROGRESS_LINES = 20
"""About as many lines show the progress of a replay."""


def say(text: str) -> None:
    """A line for people."""
    sys.stdout.write(json.dumps({"said": text}) + "\n")
    sys.stdout.flush()


class Progress:
    """Shows some of the steps, and the first one whose weights differ."""

    def __init__(self, last: int, *, name: str = "") -> None:
        self._last = last
        self._name = name and f"{name}: "
        self._is_exact = True
        self._seconds = 0.0

    def __call__(self, done: ReplayedStep) -> None:
        self._seconds += done.seconds
        is_first_difference = done.is_equal is False and self._is_exact
        self._is_exact &= done.is_equal is not False
        if done.step % max(1, self._last // PROGRESS_LINES) == 0 or done.step == self._last or is_first_difference:
            bits = {None: "", True: ", the recorded bits", False: ", other bits than recorded"}[done.is_equal]
            say(
                f"{self._name}step {done.step} of {self._last}: {done.seconds:.2f} s, {self._seconds:.0f} s in all{bits}"
            )


async def compare(path: Path, until: int | None) -> dict[str, Any]:
    with open_run(path) as run:
        # After a takeover a step may be acknowledged twice; the last acknowledgement is the one the run continued from.
        recorded = {step.step: step.digest for step in run.steps()}
        last = min(until or len(recorded), len(recorded))
        history = SettingsHistory.read(run.directory.trainer_state_file)
        machines = history.other_machines(machine_of_bits(run.config.trainer.device), until=last)
        for difference in machines:
            say(f"{difference}: other last bits are expected there")
        made = await replay(
            run.batches(last),
            model_dir=run.directory.initial_model,
            config=replay_periods(history, run.config.trainer, until=last),
            until=last,
            publishes_adapters=run.config.inference.publish == "adapter",
            recorded=recorded,
            on_step=Progress(last),
        )
    diverged = [step for step in range(1, last + 1) if made.digests.get(step) != recorded[step]]
    return {
        "run_dir": str(path),
        "steps": last,
        "digest": made.final_digest,
        "recorded_digest": recorded.get(last),
        "diverged_at": diverged[0] if diverged else None,
        "changes": [
            {"after_step": step, "settings": changed}
            for step, changed in history.changes().items()
            if step < last and changed
        ],
        "machines": machines,
    }


def recorded_periods(run: RecordedRun, until: int | None = None) -> tuple[int, list[ReplayPeriod]]:
    """The last recorded step, or `until`, and the settings of the steps up to it."""
    # A step that was trained again after a restart has several acknowledgements.
    num_steps = len({step.step for step in run.steps()})
    last = min(until or num_steps, num_steps)
    history = SettingsHistory.read(run.directory.trainer_state_file)
    return last, replay_periods(history, run.config.trainer, until=last)


def other_periods(
    run: RecordedRun,
    periods: Sequence[ReplayPeriod],
    loss: str | None,
    overrides: Sequence[str],
    *,
    advantage: str | None = None,
) -> list[ReplayPeriod]:
    """The recorded settings with changes. Raises `RunError` with every fault."""
    others = [
        replace(period, config=changed_settings(period.config, loss, overrides, advantage=advantage))
        for period in periods
    ]
    parts = {"rollout": run.config.rollout, "trainer": others[-1].config}
    if faults := [f"{path}: {message}" for path, message in reward_weights_have_functions(parts)]:
        raise RunError("; ".join(faults))
    if (weights := resolved_reward_weights(parts)) is None:
        return others
    return [replace(period, config=period.config.model_copy(update={"reward_weights": weights})) for period in others]


async def retrain_recorded(path: Path, overrides: Sequence[str]) -> dict[str, list[float | None]]:
    """The curves of a run's recorded stream, trained with other settings. Gains are those of the recorded advantages."""
    with open_run(path) as run:
        last, periods = recorded_periods(run)
        others = other_periods(run, periods, None, overrides) if overrides else periods
        steps, _ = await retrain(
            run.batches(last),
            model_dir=run.directory.initial_model,
            config=others,
            judged_by=periods[-1].config,
            on_step=Progress(last),
        )
    return curves(steps)


def load_modules_of(path: Path) -> str | None:
    """Make the user's modules of a run importable. Returns what a reader must know about them."""
    directory = RunDirectory(path.resolve())
    modules, note = recorded_modules(directory)
    extend_search_path([*modules, *directory.search_path, Path.cwd()])
    return note


async def compare_losses(
    path: Path, until: int | None, *, loss: str | None, advantage: str | None, overrides: list[str], out: Path
) -> dict[str, Any]:
    """Train the recorded stream twice, with the recorded settings and with others, and compare both."""
    with open_run(path) as run:
        last, periods = recorded_periods(run, until)
        others = other_periods(run, periods, loss, overrides, advantage=advantage)
        recorded, other = periods[-1].config, others[-1].config
        model_dir = run.directory.initial_model
        names = (f"{described(recorded, other)}, as recorded", f"{described(other, recorded)}, replayed")
        both: dict[str, dict[str, list[float | None]]] = {}
        digests = {}
        for name, config in zip(names, (periods, others), strict=True):
            steps, digest = await retrain(
                run.batches(last),
                model_dir=model_dir,
                config=config,
                judged_by=recorded,
                on_step=Progress(last, name=name),
            )
            both[name], digests[name] = curves(steps), digest
    panels = {title: {name: lines[key] for name, lines in both.items()} for key, title in MEASURES.items()}
    picture = draw_comparison(out / "curves.png", f"{run.run_id}: {last} recorded steps", panels)
    changed = {
        key: [value, other.numeric_settings().get(key)]
        for key, value in recorded.numeric_settings().items()
        if other.numeric_settings().get(key) != value
    }
    report = {
        "run_dir": str(path),
        "steps": last,
        "changed": changed,
        "digests": digests,
        "table": table_of(both),
        "picture": str(picture),
        "curves": str(out / "curves.json"),
    }
    write_json(out / "curves.json", {**report, "lines": both})
    return report


def described(config: TrainerConfig, other: TrainerConfig) -> str:
    """The loss, with the advantage if that of the other training differs."""
    advantage = config.recipe.advantage
    return config.loss if advantage == other.recipe.advantage else f"{config.loss}, {advantage}"


def curves(steps: Sequence[CounterfactualStep]) -> dict[str, list[float | None]]:
    return {name: [step.gain if name == "gain" else step.metrics.get(name) for step in steps] for name in MEASURES}


def table_of(both: Mapping[str, Mapping[str, Sequence[float | None]]]) -> list[dict[str, Any]]:
    """For each measure and each training: the mean over the first and over the last tenth of the steps."""
    rows = []
    for measure in MEASURES:
        row: dict[str, Any] = {"measure": measure}
        for name, lines in both.items():
            known = [value for value in lines[measure] if value is not None]
            tenth = max(1, len(known) // 10)
            row[name] = [_mean(known[:tenth]), _mean(known[-tenth:])]
        rows.append(row)
    return rows


def _mean(values: Sequence[float]) -> float | None:
    return round(sum(values) / len(values), 6) if values else None


def main() -> int:
    parser = argparse.ArgumentParser(prog="rollbook replay")
    parser.add_argument("run", type=Path)
    parser.add_argument("--until", type=int)
    parser.add_argument("--loss")
    parser.add_argument("--advantage")
    parser.add_argument("--set", dest="overrides", action="append", default=[])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    try:
        note = load_modules_of(args.run)
        if args.out is None:
            report = asyncio.run(compare(args.run, args.until))
        else:
            report = asyncio.run(
                compare_losses(
                    args.run,
                    args.until,
                    loss=args.loss,
                    advantage=args.advantage,
                    overrides=args.overrides,
                    out=args.out,
                )
            )
    except Exception as error:
        if not isinstance(error, RunError) and not is_out_of_memory(error):
            raise
        text = str(error)
        if is_out_of_memory(error):
            loaded = load_resolved_config(RunDirectory(args.run.resolve()))
            text = replay_shortage(loaded, doing="replaying the run", error=error, is_comparison=args.out is not None)
        # Not to stderr, where libraries write too.
        sys.stdout.write(json.dumps({"failed": text}) + "\n")
        return 1
    sys.stdout.write(json.dumps({**report, "note": note}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
