"""The two-phase proof of learning: multi-turn maths with retry, on the whole system. Prints every criterion with its value.

    make proof-cpu      python -m benchmarks.learning.proof --device cpu: a new model with a warm start
    make proof-gpu      python -m benchmarks.learning.proof --device cuda --model models/smollm2: a real model on a GPU

There are 200 problems; a step has 8 problems with 8 episodes each. Groups with a constant reward are filtered. Phase 1: staleness
bound 1, one minibatch. Phase 2: staleness bound 2, two minibatches. `--short`: the same processes for a few steps; trend and speed
are not checked.

`--seeds 100 101 102` makes the whole proof with each of these seeds, several at once on two cores each, and counts those that pass.
`--verify` also trains the recorded batches of both phases again (`rollbook replay --verify`): a further criterion.
"""

import argparse
import functools
import json
import math
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path
from typing import Any

import tomli_w
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.learning.proof_criteria import SAME_BITS, Criterion, Phase, judge_first, judge_second
from benchmarks.pinned_jobs import run_pinned
from benchmarks.report import machine, print_status
from rollbook.ledger.stores.sqlite.store import open_readonly
from rollbook.run.reader import open_run
from rollbook.telemetry.metrics import read_metrics

EXAMPLE = Path(__file__).parents[2] / "examples" / "03_maths_with_retry"
RESULTS = Path(__file__).parents[2] / "docs" / "results"
NUM_ROWS = 200
RETRY_IN_WORDS = "That is not right. Try again, and give the final answer as \\boxed{...}."


class Proof:
    def __init__(self, home: Path, args: argparse.Namespace) -> None:
        self._home = home
        self._args = args
        for file in (*EXAMPLE.glob("*.py"), *EXAMPLE.glob("*.toml")):
            shutil.copy(file, home)
        shutil.copy(Path(__file__).with_name("rollout.py"), home)

    def model(self) -> Path:
        if self._args.model is not None:
            return Path(self._args.model).resolve()
        print_status("warm start of a new model")
        count = 9_600 if not self._args.short else 1_200
        script = [sys.executable, str(self._home / "prepare_data.py"), "sums", "--to", str(self._home / "data")]
        subprocess.run([*script, "--count", str(count), "--seed", str(self._args.seed)], check=True)
        seed = ("--set", f"run.seed={self._args.seed}")
        done = self._rollbook("sft", str(self._home / "sft.toml"), "--out", str(self._home / "sft"), *seed)
        if done.returncode != 0:
            raise SystemExit(done.stderr)
        report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        print_status(f"  {report['steps']} steps, loss {report['loss_first']:.3f} → {report['loss_last']:.3f}")
        return Path(report["model"])

    def phase(self, number: int, model: Path) -> Phase:
        max_head_offpolicy_versions, minibatches = (1, 1) if number == 1 else (2, 2)
        print_status(
            f"phase {number}: staleness bound {max_head_offpolicy_versions}, minibatches per batch: {minibatches}"
        )
        directory = self._home / f"phase-{number}"
        table = tomllib.loads((self._home / "run.toml").read_text(encoding="utf-8"))
        # An evaluation would compete for the machine.
        del table["evaluation"]
        # Proofs with several seeds may share a busy machine; how fast a run starts is no criterion.
        table["run"] |= {"seed": self._args.seed, "ready_s": 600.0}
        table["model"] = {"path": str(model)}
        table["gate"] |= {
            "max_head_offpolicy_versions": max_head_offpolicy_versions,
            "max_groups_in_flight": 8 * (max_head_offpolicy_versions + 1),
        }
        del table["trainer"]["max_steps"]
        table["trainer"] |= {
            "checkpoint_every": self._args.checkpoint_every,
            "keep_checkpoints": 1000,
            "ppo_n_minibatches": minibatches,
            # The criteria are about the drift within a step.
            "old_logprobs": "snapshot",
        }
        if self._args.model is not None:
            self._use_real_model(table)
        # The run ends when every row was drawn this often. Filtered groups make no batch.
        table["tasks"]["epochs"] = math.ceil(self._args.steps * table["gate"]["groups_per_step"] / NUM_ROWS)
        source = self._home / f"phase-{number}.toml"
        source.write_text(tomli_w.dumps(table), encoding="utf-8")
        began = time.monotonic()
        done = self._rollbook("train", str(source), "--run-dir", str(directory), "--json")
        print_status(f"  {time.monotonic() - began:.0f} s, loading and compiling included")
        lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
        if not lines:
            raise SystemExit(f"phase {number} did not run:\n{done.stderr[-3000:]}")
        summary: dict[str, Any] = json.loads(lines[-1])
        if not summary["steps"]:
            raise SystemExit(f"phase {number} trained no step:\n{done.stderr[-3000:]}")
        checkpoints = sorted(int(path.name.split("-")[1]) for path in (directory / "checkpoints").glob("step-*"))
        last = directory / "checkpoints" / f"step-{checkpoints[-1]:06d}" / "model" if checkpoints else directory
        with open_run(directory) as run, open_readonly(directory / "ledger") as ledger:
            record = ledger.read_now(lambda tx: tx.runs.get(run.run_id))
        return Phase(
            trainer=read_metrics(directory / "metrics.jsonl", process="trainer"),
            rollout=read_metrics(directory / "metrics.jsonl", process="rollout"),
            exit_code=done.returncode,
            audit_ok=summary["audit"] == "ok",
            checkpoints=tuple(checkpoints),
            checkpoint_fault=checkpoint_fault(last),
            checkpoint_every=self._args.checkpoint_every,
            ended="unknown" if record is None else str(record.ended),
            replay=self._replay(directory) if self._args.verify else None,
        )

    def _replay(self, directory: Path) -> str:
        """Train all recorded batches again: SAME_BITS, or what differs."""
        done = self._rollbook("replay", str(directory), "--verify")
        return SAME_BITS if done.returncode == 0 else (done.stderr or done.stdout).strip()[-300:]

    def _use_real_model(self, table: dict[str, Any]) -> None:
        """Settings for a real model: problems in sentences, longer replies, the device, a smaller learning rate."""
        table["tasks"] = {"source": "rollout:tasks", "args": {"count": 200, "seed": 1, "held_out": 64}}
        table["rollout"] |= {
            "max_total_tokens": 256,
            "settings": {"retry_message": RETRY_IN_WORDS, "is_lenient": True},
            "sampling": {"max_tokens": 48},
        }
        dtype = "bfloat16" if self._args.device == "cuda" else "float32"
        table["inference"] |= {"device": self._args.device, "dtype": dtype, "max_model_len": 256}
        if self._args.device == "cuda":
            # The GPU is shared, so the engine's KV cache is limited.
            table["inference"] |= {"kv_memory_mb": 6_000}
        table["trainer"] |= {"device": self._args.device, "compute_dtype": dtype, "lr": 1e-5, "betas": [0.9, 0.999]}

    def _rollbook(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "rollbook", *arguments], capture_output=True, text=True, check=False
        )


def checkpoint_fault(model_dir: Path) -> str | None:
    """Load the directory with transformers and run the model once. None: it works."""
    try:
        model = AutoModelForCausalLM.from_pretrained(str(model_dir))
        tokenizer = AutoTokenizer.from_pretrained(str(model_dir))
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": "What is 3 + 4 ?"}], tokenize=False, add_generation_prompt=True
        )
        ids = tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids
        with torch.no_grad():
            logits = model(ids).logits
        return None if bool(torch.isfinite(logits).all()) else "its logits are not finite"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def prove(args: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory(prefix="rollbook-proof-") as scratch:
        proof = Proof(Path(scratch), args)
        model = proof.model()
        first = proof.phase(1, model)
        second = proof.phase(2, model)
        criteria = [
            *judge_first(first, max_head_offpolicy_versions=1, is_trend_required=not args.short),
            *judge_second(second, first, max_head_offpolicy_versions=2, minibatches=2, is_short=args.short),
        ]
        for criterion in criteria:
            print_status(criterion.line())
        if args.out is not None:
            save_results(args.out / f"proof-{args.device}", criteria, first, second, home=Path(scratch))
    rows = [{"phase": c.phase, "name": c.name, "value": c.value, "demand": c.demand, "ok": c.ok} for c in criteria]
    print(json.dumps({"criteria": rows, "ok": all(c.ok for c in criteria), "machine": machine()}))
    return 0 if all(c.ok for c in criteria) else 1


def prove_seeds(args: argparse.Namespace) -> int:
    """Prove with each seed in a process, on two cores each. Prints one line per seed; the last line counts those that pass."""
    until = time.monotonic() + 60 * args.minutes
    options = ["--device", args.device, "--steps", str(args.steps), *(["--model", args.model] if args.model else [])]
    options += [f"--{name}" for name in ("short", "verify") if getattr(args, name)]

    def prove_one(seed: int) -> dict[str, Any]:
        command = [sys.executable, "-m", "benchmarks.learning.proof", "--seed", str(seed), *options]
        left_s = max(0.0, until - time.monotonic())
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=left_s)
        except subprocess.TimeoutExpired:
            return {"seed": seed, "ok": False, "failed": ["not finished in time"]}
        lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
        if not lines:
            return {"seed": seed, "ok": False, "failed": [done.stderr[-1000:]]}
        found = json.loads(lines[-1])
        failed = [c for c in found["criteria"] if not c["ok"]]
        values = {f"{c['phase']} {c['name']}": c["value"] for c in found["criteria"]}
        return {"seed": seed, "ok": found["ok"], "failed": failed, "values": values}

    rows = []
    for job in run_pinned([functools.partial(prove_one, seed) for seed in args.seeds], cores_each=args.cores):
        row = job.result()
        rows.append(row)
        print(json.dumps(row), flush=True)
    passed = sum(row["ok"] for row in rows)
    print(json.dumps({"seeds": len(rows), "passed": passed, "machine": machine()}))
    return 0 if passed == len(rows) else 1


def save_results(folder: Path, criteria: list[Criterion], first: Phase, second: Phase, *, home: Path) -> None:
    """Write the table, the values of the curves, and the plots of both runs."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "criteria.md").write_text("\n".join(criteria_page(folder.name, criteria)) + "\n", encoding="utf-8")
    names = (
        "rollout/reward",
        "train/ppo_kl",
        "train/ppo_clip_frac",
        "async/version_offset_max",
        "perf/wait_time_ratio",
    )
    curves = {
        f"phase {number}": {name: [_rounded(row[name]) for row in phase.trainer] for name in names}
        for number, phase in ((1, first), (2, second))
    }
    (folder / "curves.json").write_text(json.dumps(curves) + "\n", encoding="utf-8")
    for number in (1, 2):
        for plot in sorted((home / f"phase-{number}" / "plots").glob("*.png")):
            shutil.copy(plot, folder / f"phase-{number}-{plot.name}")


def criteria_page(name: str, criteria: list[Criterion]) -> list[str]:
    cpu_or_gpu = "gpu" if name.endswith("cuda") else "cpu"
    lines = [f"# Criteria of the two-phase proof on a {cpu_or_gpu.upper()}", ""]
    cores = f"{os.cpu_count()} cores ({platform.machine()})"
    where = f"{torch.cuda.get_device_name()}, {cores}" if cpu_or_gpu == "gpu" else cores
    lines += [f"Written by `make proof-{cpu_or_gpu}` on {where}.", ""]
    lines += ["| phase | criterion | value | required | |", "|---|---|---|---|---|"]
    return lines + [
        f"| {c.phase} | `{c.name}` | {c.value} | {c.demand} | {'pass' if c.ok else '**fail**'} |" for c in criteria
    ]


def _rounded(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(f"{value:.4g}")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--model", help="a Hugging Face directory; default: a new model with a warm start")
    parser.add_argument(
        "--steps",
        type=int,
        help="batches of each phase, filtered groups included; default 150, 60 with --model, 6 with --short",
    )
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--seed", type=int, default=0, help="of the data order, the warm start and the samples")
    parser.add_argument("--verify", action="store_true", help="replay both phases and compare the weights to the bit")
    parser.add_argument("--seeds", type=int, nargs="+", help="make the proof with each of these seeds")
    parser.add_argument("--cores", type=int, default=2, help="with --seeds: cores of a proof")
    parser.add_argument("--minutes", type=float, default=600.0, help="with --seeds: time limit of the whole command")
    parser.add_argument("--out", type=Path, help="write table, curves and plots to this directory (docs/results)")
    args = parser.parse_args(argv)
    # After about 80 batches a real model knows the 200 problems; then nearly all groups have a constant reward and are filtered.
    args.steps = args.steps or (6 if args.short else 150 if args.model is None else 60)
    args.checkpoint_every = max(1, args.steps // 6)
    return prove_seeds(args) if args.seeds else prove(args)


if __name__ == "__main__":
    sys.exit(main())
