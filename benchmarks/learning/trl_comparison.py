"""The same model, tasks, loss and seeds through TRL's GRPO and through `rollbook train` without lag: do they learn the same?

    make learning-trl

One-digit sums with the warm start of examples/03_maths_with_retry. Each seed is trained by both, one after the other. The figures
compare the reward of every window of ten steps, and the accuracy on held-out sums, which `rollbook eval` measures for both.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tomli_w

from benchmarks.learning.runs import Stop, save, train
from benchmarks.report import Figure, print_figures, print_status

ROOT = Path(__file__).parents[2]
TRL = ROOT / ".venvs" / "trl" / "bin" / "python"
EXAMPLE = ROOT / "examples" / "03_maths_with_retry"
GROUPS, SAMPLES, MAX_TOKENS, LR = 8, 8, 4, 1e-3
WINDOW = 10


def run_config(model: Path, home: Path, *, seed: int, steps: int) -> dict[str, Any]:
    return {
        "run": {"name": "trl-comparison", "seed": seed},
        "model": {"path": str(model)},
        "tasks": {"source": str(home / "train.jsonl"), "seed": seed},
        "rollout": {
            "function": "rollout",
            "completions_per_prompt": SAMPLES,
            "drop_constant_reward": False,
            "max_total_tokens": 64,
            "sampling": {"max_tokens": MAX_TOKENS},
        },
        "gate": {"groups_per_step": GROUPS, "max_groups_in_flight": GROUPS, "max_head_offpolicy_versions": 0},
        "trainer": {
            "max_steps": steps,
            "lr": LR,
            "loss": "grpo",
            # TRL's loss type "grpo" is the mean over sequences of their token means.
            "reduction": "sequence_mean",
            "checkpoint_every": 100_000,
            "seed": seed,
        },
        "evaluation": {"source": str(home / "test.jsonl"), "greedy": False, "episodes": 32},
    }


def prepare(home: Path) -> Path:
    """Write the tasks of both splits, and make the warm start. Returns its model directory."""
    for file in (*EXAMPLE.glob("*.py"), EXAMPLE / "sft.toml", Path(__file__).with_name("rollout.py")):
        shutil.copy(file, home)
    subprocess.run([sys.executable, "prepare_data.py", "sums", "--to", "data"], check=True, cwd=home)
    listed = "import json, sums; print(json.dumps(list(sums.tasks())))"
    done = subprocess.run([sys.executable, "-c", listed], check=True, cwd=home, stdout=subprocess.PIPE, text=True)
    for split in ("train", "test"):
        rows = [{**row, "answer": int(row["answer"])} for row in json.loads(done.stdout) if row["split"] == split]
        (home / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    command = [sys.executable, "-m", "rollbook", "sft", "sft.toml", "--out", "warm"]
    subprocess.run(command, check=True, cwd=home, stdout=subprocess.DEVNULL)
    return home / "warm" / "final"


def train_ours(model: Path, home: Path, *, seed: int, steps: int) -> tuple[list[float], float]:
    name = f"rollbook-{seed}"
    run = train(name, run_config(model, home, seed=seed, steps=steps), home, Stop(needs_checkpoint=True))
    if not run.audit_ok or len(run.steps) != steps:
        raise RuntimeError(f"{name}: {len(run.steps)} of {steps} steps, audit {'ok' if run.audit_ok else 'failed'}")
    verified = subprocess.run(
        [sys.executable, "-m", "rollbook", "replay", "--verify", str(run.directory)], capture_output=True, check=False
    )
    if verified.returncode:
        raise RuntimeError(f"{name}: the replay differs\n{verified.stderr.decode()[-2000:]}")
    return [row["rollout/reward"] for row in run.steps], held_out(run.directory, home, name)


def train_theirs(model: Path, home: Path, *, seed: int, steps: int) -> tuple[list[float], float]:
    name = f"trl-{seed}"
    options = {
        "model": model, "tasks": home / "train.jsonl", "out": home / name, "steps": steps, "seed": seed, "lr": LR,
        "groups": GROUPS, "samples": SAMPLES, "max-tokens": MAX_TOKENS,
    }  # fmt: skip
    command = [str(TRL), "-m", "benchmarks.learning.trl_grpo"]
    command += [word for option, value in options.items() for word in (f"--{option}", str(value))]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    if done.returncode:
        raise RuntimeError(f"{name} failed:\n{done.stderr[-3000:]}")
    reward: list[float] = json.loads(done.stdout.splitlines()[-1])
    return reward, held_out(home / name, home, name)


def held_out(model: Path, home: Path, name: str) -> float:
    """Accuracy of a model or run directory on the held-out sums, sampled as in training."""
    out = home / f"{name}-held-out.json"
    command = [sys.executable, "-m", "rollbook", "eval", str(model), "--config", str(home / "evaluation.toml")]
    subprocess.run([*command, "--out", str(out)], check=True, capture_output=True, cwd=home)
    results = json.loads(out.read_text(encoding="utf-8"))["results"]
    return float(next(row for row in results if row["label"] == "all")["solved"]["mean"])


def windows(reward: Sequence[float]) -> list[float]:
    return [statistics.fmean(reward[at : at + WINDOW]) for at in range(0, len(reward), WINDOW)]


def ranges_overlap(one: Sequence[float], other: Sequence[float]) -> bool:
    return min(one) <= max(other) and min(other) <= max(one)


def figures(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> list[Figure]:
    curves = [[windows(run["reward"]) for run in runs] for runs in (ours, theirs)]
    per_window = [zip(*curve, strict=True) for curve in curves]
    overlaps = [ranges_overlap(one, other) for one, other in zip(*per_window, strict=True)]
    share = statistics.fmean(overlaps)
    found = [
        Figure(
            name="windows_within_spread", ours=share, peer=1.0, unit="share", ratio=share, floor=0.9,
            more={"windows": len(overlaps), "seeds": len(ours)},
        )
    ]  # fmt: skip
    for name, value in (
        ("mean_reward", lambda run: statistics.fmean(run["reward"])),
        ("reward_at_end", lambda run: windows(run["reward"])[-1]),
        ("held_out_accuracy", lambda run: run["held_out"]),
    ):
        one, other = ([value(run) for run in runs] for runs in (ours, theirs))
        mine, peer = statistics.median(one), statistics.median(other)
        more = {
            "ours_range": [min(one), max(one)],
            "peer_range": [min(other), max(other)],
            "overlap": ranges_overlap(one, other),
        }
        found.append(Figure(name=name, ours=mine, peer=peer, unit="", ratio=mine / peer, more=more))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--out", type=Path, help="write the curves to this JSON file")
    args = parser.parse_args()
    if not TRL.exists():
        parser.error("TRL is not installed: `make learning-trl` makes .venvs/trl")
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        model = prepare(home)
        (home / "evaluation.toml").write_text(tomli_w.dumps(run_config(model, home, seed=0, steps=1)), encoding="utf-8")
        before = held_out(model, home, "before")
        print_status(f"before: {before:.1%} of the held-out sums")
        found: dict[str, list[dict[str, Any]]] = {"rollbook": [], "trl": []}
        for seed in args.seeds:
            for name, learn in (("rollbook", train_ours), ("trl", train_theirs)):
                reward, after = learn(model, home, seed=seed, steps=args.steps)
                found[name].append({"seed": seed, "held_out": after, "reward": [round(value, 5) for value in reward]})
                curve = " ".join(f"{value:.2f}" for value in windows(reward))
                print_status(f"{name}, seed {seed}: held-out {after:.1%}, reward by ten steps {curve}")
    if args.out is not None:
        save(args.out, {"before": before, **found})
    return print_figures(figures(found["rollbook"], found["trl"]), held_out_before=before)


if __name__ == "__main__":
    sys.exit(main())
