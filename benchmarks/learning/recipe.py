"""Runs the stages of an example within a time limit: warm start, training, and evaluations on held-out tasks before and after.

    python -m benchmarks.learning.recipe examples/10_reasoning_gym --model models/smollm2 --minutes 6 --out runs/reasoning-gym

The example has `sft.toml` and `run.toml`; its data are prepared. Evaluated are the given model, the warm-started model and the
trained one. Prints one JSON line per stage. A stage whose result exists is skipped, so the same command continues. Training ends
in time for the last evaluation. `report.md` and `report.json` have the solve rates by label, with Wilson intervals, and the
difference between both over the same tasks, whose interval is narrower.
"""

import argparse
import json
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.report import print_status
from rollbook.rollout.evaluation import Share, mean_share
from rollbook.telemetry.metrics import read_metrics

STAGES = ("base", "warm", "trained")
START_S, STOP_S = 40.0, 20.0
"""Start of an evaluation, and the last checkpoint of the training."""


class Recipe:
    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._out: Path = args.out.resolve()
        self._out.mkdir(parents=True, exist_ok=True)
        self._until = time.monotonic() + 60 * args.minutes
        self._evaluation_s = 30.0
        self._config = args.example / "run.toml"

    def run(self) -> dict[str, Any]:
        warm = self._out / "sft" / "final"
        stages = STAGES[1:] if self._args.without_base else STAGES
        if "base" in stages:
            self._evaluate("base", self._args.model)
        if not warm.is_dir():
            self._stage(
                "sft",
                "sft",
                self._args.example / "sft.toml",
                "--out",
                warm.parent,
                *self._set_model(self._args.model),
                *_sets(self._args.set_sft),
            )
        self._evaluate("warm", warm)
        run_dir = self._out / "rl"
        if not (self._out / "trained.json").is_file():
            self._train(run_dir, warm)
        self._evaluate("trained", run_dir)
        results = {name: json.loads((self._out / f"{name}.json").read_text(encoding="utf-8")) for name in stages}
        steps = read_metrics(run_dir / "metrics.jsonl", process="trainer")
        share = difference(results["warm"], results["trained"])
        report = {
            "example": self._args.example.name,
            "seed": self._args.seed,
            "steps": len(steps),
            "training_s": round(steps[-1]["time"] - steps[0]["time"], 1) if steps else None,
            "max_lag": max((row["async/version_offset_max"] or 0 for row in steps), default=None),
            "results": {name: found["results"] for name, found in results.items()},
            "difference": share.row(),
        }
        (self._out / "report.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        same = f"Difference over the same tasks: {share.mean:+.1%} [{share.low:+.1%}, {share.high:+.1%}]"
        (self._out / "report.md").write_text("\n".join([*table(results), "", same, ""]), encoding="utf-8")
        return report

    def _evaluate(self, name: str, target: Path) -> None:
        out = self._out / f"{name}.json"
        if out.is_file():
            return
        began = time.monotonic()
        config = () if (target / "run.json").is_file() else ("--config", self._config)
        self._stage(name, "eval", target.resolve(), *config, "--out", out, *_sets(self._args.set))
        self._evaluation_s = time.monotonic() - began
        found = json.loads(out.read_text(encoding="utf-8"))["results"]
        print(
            json.dumps(
                {"stage": name, "solved": {row["label"]: row["solved"]["mean"] for row in found if row["solved"]}}
            ),
            flush=True,
        )

    def _train(self, run_dir: Path, warm: Path) -> None:
        command = [self._config, "--run-dir", run_dir, "--json", *self._set_model(warm), *_sets(self._args.set)]
        left_s = self._until - time.monotonic() - 1.2 * self._evaluation_s - STOP_S
        print_status(f"training for {left_s:.0f} s at most")
        began = time.monotonic()
        with (self._out / "train.log").open("a") as log:
            process = subprocess.Popen(_command("train", *command), stdout=log, stderr=log)
            try:
                process.wait(max(START_S, left_s))
            except subprocess.TimeoutExpired:
                # On a slow machine the start alone may take the time that is left: train one step, or all was in vain.
                while process.poll() is None and not read_metrics(run_dir / "metrics.jsonl", process="trainer"):
                    time.sleep(1.0)
                process.send_signal(signal.SIGINT)
            process.wait()
        if not read_metrics(run_dir / "metrics.jsonl", process="trainer"):
            raise SystemExit(f"no step was trained:\n{(self._out / 'train.log').read_text()[-3000:]}")
        print(json.dumps({"stage": "train", "seconds": round(time.monotonic() - began, 1)}), flush=True)

    def _stage(self, name: str, verb: str, *arguments: object) -> None:
        began = time.monotonic()
        done = subprocess.run(_command(verb, *arguments), stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode != 0:
            raise SystemExit(f"stage {name} failed with exit code {done.returncode}; see above")
        print(json.dumps({"stage": f"{verb} {name}", "seconds": round(time.monotonic() - began, 1)}), flush=True)

    def _set_model(self, path: Path) -> list[str]:
        return _sets([f"model={{path = {json.dumps(str(path.resolve()))}}}", f"run.seed={self._args.seed}"])


def _command(verb: str, *arguments: object) -> list[str]:
    return [sys.executable, "-m", "rollbook", verb, *map(str, arguments)]


def _sets(overrides: Sequence[str]) -> list[str]:
    return [part for text in overrides for part in ("--set", text)]


def table(results: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Solved held-out tasks by label. Bold: the interval after training is above the one after the warm start."""
    by_label = {name: {row["label"]: row for row in found["results"]} for name, found in results.items()}
    lines = ["| | tasks × episodes | before | after the warm start | after training |", "|---|---|---|---|---|"]
    for label, last in by_label["trained"].items():
        cells = [_share(by_label.get(name, {}).get(label)) for name in STAGES]
        warm = by_label["warm"].get(label)
        if warm and warm["solved"] and last["solved"] and last["solved"]["low"] > warm["solved"]["high"]:
            cells[-1] = f"**{cells[-1]}**"
        lines.append(
            f"| {label} | {last['tasks']} × {last['episodes'] // max(1, last['tasks'])} | {' | '.join(cells)} |"
        )
    return lines


def difference(before: Mapping[str, Any], after: Mapping[str, Any]) -> Share:
    """Mean difference of the solved share, over the tasks with scorable episodes in both evaluations."""
    rates = [
        {t["id"]: sum(t["solved"]) / len(t["solved"]) for t in one["tasks"] if t["solved"]} for one in (before, after)
    ]
    return mean_share([rates[1][task] - rate for task, rate in rates[0].items() if task in rates[1]])


def _share(row: Mapping[str, Any] | None) -> str:
    if row is None or row["solved"] is None:
        return "–"
    solved = row["solved"]
    return f"{solved['mean']:.1%} [{solved['low']:.0%}–{solved['high']:.0%}]"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("example", type=Path, help="a folder with sft.toml and run.toml")
    parser.add_argument("--model", type=Path, required=True, help="a Hugging Face directory")
    parser.add_argument("--minutes", type=float, default=10.0, help="time limit of all stages")
    parser.add_argument("--without-base", action="store_true", help="do not evaluate the given model, which takes time")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.FIELD=VALUE", help="of run.toml")
    parser.add_argument("--set-sft", action="append", default=[], metavar="SECTION.FIELD=VALUE", help="of sft.toml")
    report = Recipe(parser.parse_args()).run()
    print(json.dumps(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
