"""Does LoRA learn, and how does it compare with training all weights? The same tasks and seeds, held-out accuracy by step.

    python -m benchmarks.learning.lora --model models/smollm2 --device cuda
    python -m benchmarks.learning.lora --small --device cpu --seeds 3

The task, the sizes and the evaluation are those of `benchmarks.learning.gpu`, with staleness bound 1. Engine and trainer compute in
bfloat16 on both devices. LoRA has rank 16, alpha 32, and ten times the learning rate, as by default. A figure is the mean accuracy
of the last evaluation over the seeds, against that of the first (`learned`) and against training all weights (`lora_over_full`).
"""

import argparse
import shutil
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.learning.gpu import run_config
from benchmarks.learning.runs import LearningRun, Stop, save, train
from benchmarks.learning.tiny import tiny_model
from benchmarks.report import Figure, print_figures, print_status
from rollbook.trainer.optimizer import LORA_FACTOR

LORA = {"rank": 16, "alpha": 32}
LEAST_START = 0.05
"""Lower bound of the accuracy at the start, so that one lucky answer more does not count as learning."""


def table(args: argparse.Namespace, model: Path, *, seed: int, is_lora: bool) -> dict[str, Any]:
    config = run_config(args, model=model, seed=seed, max_head_offpolicy_versions=1, harder={}, steps=args.steps)
    config["inference"] |= {"dtype": "bfloat16"}
    config["trainer"] |= {"compute_dtype": "bfloat16"}
    if is_lora:
        config["trainer"] |= {"lora": LORA, "lr": LORA_FACTOR * config["trainer"]["lr"]}
    return config


def measure(args: argparse.Namespace, home: Path) -> int:
    model = tiny_model(home, seed=0) if args.small else args.model.resolve()
    shutil.copy(Path(__file__).with_name("rollout.py"), home)
    runs: dict[str, list[LearningRun]] = {"lora": [], "full": []}
    for seed in range(args.seeds):
        for kind, done in runs.items():
            settings = table(args, model, seed=seed, is_lora=kind == "lora")
            run = train(f"{kind}-{seed}", settings, home, Stop(limit_s=args.limit_s))
            points = ", ".join(f"{step}: {solved:.3f}" for step, _, solved in run.curve)
            print_status(f"{run.name}: {run.step_s:.3f} s a step, audit ok: {run.audit_ok}; by step {points}")
            done.append(run)
            save(args.out / "lora.json", {"runs": [run.row() for many in runs.values() for run in many]})
    starts, lora, full = (
        statistics.fmean(run.curve[at][2] for run in many)
        for at, many in ((0, runs["lora"]), (-1, runs["lora"]), (-1, runs["full"]))
    )
    ends = {kind: [round(run.curve[-1][2], 4) for run in many] for kind, many in runs.items()}
    figures = [
        Figure(
            name="learned",
            ours=lora,
            peer=starts,
            unit="solved",
            ratio=lora / max(starts, LEAST_START),
            floor=1.2,
            more={"seeds": args.seeds, "last": ends["lora"]},
        ),
        Figure(
            name="lora_over_full",
            ours=lora,
            peer=full,
            unit="solved",
            ratio=lora / max(full, LEAST_START),
            more={"last": ends},
        ),
    ]
    return print_figures(figures, runs=[run.row() for many in runs.values() for run in many])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a Hugging Face directory")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="a tiny model that is made on the spot, and single digits")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=120, help="of each run; the learning rate falls to 0 over them")
    parser.add_argument("--limit-s", type=float, default=120.0, help="maximum training seconds of each run")
    parser.add_argument("--evaluate-every", type=int, default=10, help="steps between evaluations")
    parser.add_argument("--workers", type=int, default=6, help="rollout worker processes")
    parser.add_argument(
        "--out", type=Path, default=Path("docs/results/learning"), help="output directory of the curves"
    )
    args = parser.parse_args()
    args.trainer, args.inference = {}, {}
    if not args.small and args.model is None:
        parser.error("--model is required without --small")
    with tempfile.TemporaryDirectory(prefix="rollbook-lora-") as home:
        return measure(args, Path(home))


if __name__ == "__main__":
    sys.exit(main())
