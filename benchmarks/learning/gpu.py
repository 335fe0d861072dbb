"""A real model learns arithmetic through the real asynchronous loop, on one GPU that engine and trainer share.

    python -m benchmarks.learning.gpu --join part-0 part-1 --to models/smollm2     # a model that came in pieces
    python -m benchmarks.learning.gpu --model models/smollm2 --device cuda

"What is a ± b?" with two-digit numbers; the last number of the reply must match. 64 prompts × 8 samples a step, float32 master
weights, learning rate 3e-5, at most 48 tokens a reply; greedy accuracy on 512 held-out questions, measured beside training. The
same with lag budget 1 (asynchronous) and 0 (synchronous), where by construction each side runs alone: its waiting is generation
alone, its training and publishing are training alone. Then a harder task: three-digit numbers, unless `--harder` says otherwise.

`--small --device cpu` runs the same script with a model of a hundred thousand parameters made on the spot.
"""

import argparse
import shutil
import statistics
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

from benchmarks.learning.curves import draw
from benchmarks.learning.runs import LearningRun, Stop, save, train
from benchmarks.learning.tiny import tiny_model
from benchmarks.report import Figure, print_figures, tell

NAIVE_S, NAIVE_STEPS, MARK = 111.0, 131, 0.56
"""A naive synchronous loop on the same machine: 3.3 % to 56.4 % in 131 steps and 111 s."""
STEADY = {
    # At this learning rate the policy moves by about 0.04 nats a token in one step. Without a ratio to the sampler, groups that are
    # a version or two old pull it about: measured with lag 2, held-out accuracy swung between 12 and 46 %. So the ratio is taken
    # to the policy that sampled (the engine's logprobs agree with the trainer's to 0.001 nats), and clipped on both sides.
    "loss": "dapo",
    "old_logprobs": "engine",
    # Adam's first steps are as large as its learning rate, whatever the gradient; and gradients grow tenfold as rewards appear,
    # which a long memory of their squares takes for small ones.
    "warmup_steps": 5,
    "betas": [0.9, 0.99],
    # What is left after the first jump is noise of the steps: they become smaller towards the end.
    "schedule": "linear",
}


def table(
    args: argparse.Namespace, *, model: Path, seed: int, budget: int, harder: dict[str, Any], steps: int
) -> dict[str, Any]:
    is_gpu = args.device == "cuda"
    # Small: single digits, so that a model made on the spot gets somewhere.
    shape = {
        "terms": 2,
        "spaced": args.small,
        "least": 0 if args.small else 10,
        "most": 9 if args.small else 99,
    } | harder
    held_out = 40 if args.small else 512
    groups = 8 if args.small else 64
    return {
        "run": {"name": "learning", "seed": seed},
        "model": {"path": str(model)},
        "tasks": {
            "source": "rollout:tasks",
            "args": {"count": 100 if args.small else 4096, "seed": 1 + seed, "held_out": held_out, **shape},
        },
        "rollout": {
            "function": "rollout",
            "completions_per_prompt": 8,
            "drop_constant_reward": False,
            "max_total_tokens": 64 if args.small else 192,
            "max_seconds": 60.0,
            "workers": args.workers,
            "groups_per_worker": 3 * groups,
            "sampling": {"max_tokens": 8 if args.small else 48},
        },
        "gate": {
            "groups_per_step": groups,
            "max_groups_in_flight": groups * (budget + 1),
            "max_head_offpolicy_versions": budget,
        },
        "ledger": {"durability": "process_crash"},
        "inference": {
            "device": args.device,
            "dtype": "bfloat16" if is_gpu else "float32",
            "max_running": 1024 if is_gpu else 256,
            "max_connections": 512,
            **({} if args.small else {"max_model_len": 256}),
            # The GPU is shared: the engine leaves to the trainer what it does not need for its slots.
            **({"kv_memory_mb": 12_000} if is_gpu else {}),
            **args.inference,
        },
        "trainer": {
            "max_steps": steps,
            "lr": 1e-3 if args.small else 3e-5,
            "device": args.device,
            "compute_dtype": "bfloat16" if is_gpu else "float32",
            "threads": 4 if is_gpu else 1,
            "max_tokens_per_microbatch": 32_768,
            "pass_cost_tokens": 8192 if is_gpu else 192,
            "checkpoint_every": 100_000,
            **({} if args.small else STEADY),
            **args.trainer,
        },
        "evaluation": {
            "every_steps": args.evaluate_every,
            "policy": "shared",
            "source": "rollout:tasks",
            "args": {"count": 0, "seed": 0, "held_out": held_out, **shape},
            "concurrency": 512,
            "final_wait_s": 20.0,
        },
    }


def measure(args: argparse.Namespace, home: Path) -> int:
    model = tiny_model(home, seed=0) if args.small else args.model.resolve()
    shutil.copy(Path(__file__).with_name("rollout.py"), home)
    runs: list[LearningRun] = []

    def one(
        name: str, *, budget: int, stop: Stop, seed: int = 0, base: Path = model, **harder: Any
    ) -> LearningRun | None:
        tell(f"{name}: lag budget {budget}, seed {seed} {harder or ''}")
        settings = table(args, model=base, seed=seed, budget=budget, harder=harder, steps=args.steps)
        try:
            run = train(name, settings, home, stop)
        except Exception as error:
            # One run that fails must not cost the others their machine time.
            tell(f"{name} FAILED: {error}")
            return None
        tell(
            f"{name}: {len(run.steps)} steps, {run.step_s:.3f} s a step (wait {run.mean_of('perf/sample_wait_time'):.3f}, train "
            f"{run.mean_of('perf/train_time'):.3f}, sync {run.mean_of('perf/weight_sync_time'):.3f}), start {run.start_s:.1f} s, "
            f"first step {run.first_step_s:.1f} s, lag at most {run.max_lag}, audit ok: {run.audit_ok}"
        )
        runs.append(run)
        save(args.out / "learning.json", {"runs": [r.row() for r in runs], "mark": args.mark, "naive_s": NAIVE_S})
        return run

    asynchronous = []
    for seed in range(args.seeds):
        # The first leaves a checkpoint, from which the harder task begins.
        stop = Stop(mark=args.mark, limit_s=args.limit_s, needs_checkpoint=seed == 0 and args.harder_limit_s > 0)
        if run := one(f"async-{seed}", budget=args.budget, seed=seed, stop=stop):
            asynchronous.append(run)
    synchronous = None
    if args.sync_limit_s > 0:
        stop = Stop(mark=args.mark, limit_s=args.sync_limit_s)
        synchronous = one("sync", budget=0, stop=stop)
    harder = None
    if args.harder_limit_s > 0:
        base = _last_model(asynchronous[0].directory) if asynchronous else None
        stop = Stop(limit_s=args.harder_limit_s)
        harder = one("harder", budget=args.budget, base=base or model, stop=stop, **args.harder)
    draw(args.out, [run.row() for run in runs], mark=args.mark, naive=None if args.small else (NAIVE_S, MARK))
    return print_figures(_figures(args, asynchronous, synchronous, harder), runs=[run.row() for run in runs])


def _last_model(directory: Path) -> Path | None:
    found = sorted((directory / "checkpoints").glob("step-*/model"))
    return found[-1] if found else None


def _figures(
    args: argparse.Namespace, many: list[LearningRun], sync: LearningRun | None, harder: LearningRun | None
) -> list[Figure]:
    figures = []
    reached = [at[1] if (at := run.at_mark(args.mark)) else float("inf") for run in many]
    if reached:
        ours = statistics.median(reached)
        figures.append(
            Figure(
                name="time_to_mark",
                ours=ours,
                peer=NAIVE_S,
                unit="s",
                ratio=NAIVE_S / ours,
                floor=None if args.small else 1.0,
                more={
                    "mark": args.mark,
                    "seconds": [round(s, 1) for s in reached],
                    "steps": [at[0] if (at := run.at_mark(args.mark)) else None for run in many],
                    "before": [run.curve[0][2] for run in many if run.curve],
                    "best": [max(point[2] for point in run.curve) for run in many if run.curve],
                },
            )
        )
    if many and sync:
        step_s = statistics.median(run.step_s for run in many)
        generation = sync.mean_of("perf/sample_wait_time")
        training = sync.mean_of("perf/train_time") + sync.mean_of("perf/weight_sync_time")
        alone = {"generation_alone_s": round(generation, 4), "training_alone_s": round(training, 4)}
        ideal = max(generation, training)
        figures += [
            Figure(
                name="async_over_sync",
                ours=step_s,
                peer=sync.step_s,
                unit="s/step",
                ratio=sync.step_s / step_s,
                more=alone,
            ),
            # Two machines would reach it; on one GPU that both sides share, their kernels also wait for each other.
            Figure(name="async_of_ideal", ours=step_s, peer=ideal, unit="s/step", ratio=ideal / step_s, more=alone),
        ]
        both = [at[1] for run in (*many, sync) if (at := run.at_mark(args.mark))]
        if (at := sync.at_mark(args.mark)) and len(both) > 1:
            ours = statistics.median(both[:-1])
            figures.append(Figure(name="async_to_mark", ours=ours, peer=at[1], unit="s", ratio=at[1] / ours))
    if harder and len(harder.curve) > 1:
        before, best = harder.curve[0][2], max(point[2] for point in harder.curve)
        figures.append(
            Figure(
                name="harder_task",
                ours=best,
                peer=before,
                unit="solved",
                # One lucky answer more is no learning: what was solved before counts as a twentieth at least.
                ratio=best / max(before, 0.05),
                floor=None if args.small else 2.0,
                more={"task": args.harder, "steps": len(harder.steps), "seconds": round(harder.raw_s, 1)},
            )
        )
    return figures


def join(parts: list[Path], target: Path) -> None:
    """A GGUF file that was carried here in pieces becomes a model directory."""
    with tempfile.TemporaryDirectory(prefix="rollbook-join-") as scratch:
        whole = Path(scratch) / "model.gguf"
        with whole.open("wb") as out:
            for part in parts:
                with part.open("rb") as file:
                    shutil.copyfileobj(file, out)
        command = [
            sys.executable,
            "-m",
            "rollbook",
            "models",
            "get",
            "smollm2",
            "--from",
            str(whole),
            "--to",
            str(target),
        ]
        subprocess.run(command, check=True)


def _setting(text: str) -> tuple[str, Any]:
    name, _, value = text.partition("=")
    return name, tomllib.loads(f"value = {value}")["value"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a Hugging Face directory")
    parser.add_argument(
        "--join", type=Path, nargs="+", metavar="PART", help="join these files into a GGUF, convert it, and end"
    )
    parser.add_argument("--to", type=Path, default=Path("models/smollm2"), help="where --join puts the model")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="a tiny model and single digits, to try the script itself")
    parser.add_argument("--seeds", type=int, default=3, help="asynchronous runs")
    parser.add_argument("--budget", type=int, default=1, help="lag budget of the asynchronous runs")
    parser.add_argument("--mark", type=float, default=MARK, help="held-out accuracy at which a run is stopped")
    parser.add_argument("--steps", type=int, default=140, help="steps at most; the learning rate falls to 0 over them")
    parser.add_argument(
        "--limit-s", type=float, default=75.0, help="seconds of training at most, each asynchronous run"
    )
    parser.add_argument(
        "--sync-limit-s", type=float, default=45.0, help="the same for the synchronous run; 0 leaves it out"
    )
    parser.add_argument(
        "--harder-limit-s", type=float, default=45.0, help="the same for the harder task; 0 leaves it out"
    )
    parser.add_argument(
        "--harder",
        type=_setting,
        action="append",
        metavar="FIELD=VALUE",
        help="terms, least or most of the harder task",
    )
    parser.add_argument("--evaluate-every", type=int, default=8, help="steps between measurements")
    parser.add_argument("--workers", type=int, default=6, help="rollout worker processes")
    parser.add_argument("--out", type=Path, default=Path("docs/results/learning"), help="where curves are kept")
    parser.add_argument("--trainer", type=_setting, action="append", default=[], metavar="FIELD=VALUE")
    parser.add_argument("--inference", type=_setting, action="append", default=[], metavar="FIELD=VALUE")
    args = parser.parse_args()
    args.trainer, args.inference = dict(args.trainer), dict(args.inference)
    args.harder = dict(args.harder or ({"terms": 3} if args.small else {"least": 100, "most": 999}))
    if args.join:
        join(args.join, args.to)
        return 0
    if not args.small and args.model is None:
        parser.error("name the model with --model, or try --small")
    with tempfile.TemporaryDirectory(prefix="rollbook-learning-") as home:
        return measure(args, Path(home))


if __name__ == "__main__":
    sys.exit(main())
