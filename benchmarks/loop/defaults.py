"""What a user gets without a setting: the run file of `rollbook init` against the best settings by hand, and the memory plan.

    python -m benchmarks.loop.defaults                           135M and 1.5B in full, 4B and 8B with LoRA, on one GPU
    python -m benchmarks.loop.defaults --cases 4b-lora 8b-lora --seconds 260
    python -m benchmarks.loop.defaults --cases cpu               the same script with a small model, without a GPU
    python -m benchmarks.loop.defaults --cases 8b-lora --limits 80 48      runs within `run.gpu_memory_gb`

Every run is `rollbook init --template single_turn --model DIR` with 16 groups of 8 answers a step and a staleness bound of 2. Only
the lengths of answers are set: 64 to 512 tokens, the same for all answers to a question. Models have random weights.
`defaults_CASE`: seconds a step with the best settings by hand over those without a setting. `memory_CASE`: measured peak of
the GPU over the planned one, of the trainer without what its allocator keeps unused. Each run prints a line of JSON as soon as it
ends; `--save` appends it to a file.
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import tomli_w
import torch
from transformers import LlamaForCausalLM

from benchmarks.engine.models import QWEN_1_5B, SMALL, SMOLLM2_135M, Shape, llama_config
from benchmarks.engine.workloads import LLAMA_8B
from benchmarks.learning.runs import LearningRun, Stop, train
from benchmarks.loop.startup import process_name
from benchmarks.report import Figure, print_figures, print_status
from rollbook.commands.training.init import init_project
from rollbook.run.config.run import load_config
from rollbook.run.resources.automatic import Resolution, resolve
from rollbook.run.resources.machine import GB, driver_gpus, this_machine
from rollbook.run.resources.memory_plan import CONTEXT_BYTES, gpu
from rollbook.trainer.model.model_directory import build_tokenizer
from rollbook.trainer.model_config import ModelBuildConfig

FLOOR = 0.9
WARM_UP_STEPS = 3
STEPS = 12
"""Measured steps after which a run is stopped."""
END_S = 12.0
"""Kept for the end of a run."""
SHORTEST, LONGEST, MAX_TOTAL = 64, 512, 640
QWEN_4B = Shape(layers=36, hidden=2560, heads=20, kv_heads=4, ffn=9728, vocab=151_936, max_len=4096)
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"

ROLLOUT = f'''"""Answers of random tokens: each has the length that its question draws, and no stop token ends it."""

import random

from rollbook import TO_BE_SCORED, MessageTrajectoryAssembler


def make_rollout(setup):
    async def rollout(row):
        chat = MessageTrajectoryAssembler(setup.tokenizer, setup.sampling)
        chat.add_message("user", row["question"])
        length = random.Random(row["id"]).randint({SHORTEST}, {LONGEST})
        chat.add_completion(await setup.policy.complete(chat.next_prompt(), max_tokens=length, stop_token_ids=()))
        return chat.build(reward=None, invalid_cause=TO_BE_SCORED)

    return rollout
'''
REWARDS = '''"""A reward that differs between the answers to a question."""


def correct(case):
    return float(len(case.response) % 7)
'''


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    shape: Shape
    tokens_per_pass: int
    """By hand: about a quarter of the GPU."""
    lora: bool = False


CASES = {
    "cpu": Case(shape=SMALL, tokens_per_pass=16_384),
    "135m": Case(shape=SMOLLM2_135M, tokens_per_pass=65_536),
    "1.5b": Case(shape=QWEN_1_5B, tokens_per_pass=16_384),
    "4b-lora": Case(shape=QWEN_4B, tokens_per_pass=8192, lora=True),
    "8b-lora": Case(shape=LLAMA_8B, tokens_per_pass=8192, lora=True),
}


def by_hand(case: Case) -> dict[str, dict[str, Any]]:
    """The settings with which `benchmarks.loop.speed` is fast, for this workload: 48 groups of 8 in flight."""
    shape = case.shape
    kv_mb = 1.25e-6 * 48 * 8 * MAX_TOTAL * 4 * shape.layers * shape.kv_heads * shape.hidden // shape.heads
    if case.shape is SMALL:
        return {}
    return {
        "rollout": {"workers": 8, "groups_per_worker": 16},
        "ledger": {"durability": "process_crash"},
        "inference": {
            "device": "cuda",
            "dtype": "bfloat16",
            "max_running": 384,
            "max_model_len": MAX_TOTAL + 8,
            "kv_memory_mb": max(2000.0, kv_mb),
            "max_connections": 512,
            "transfer": "cuda_ipc",
        },
        "trainer": {
            "device": "cuda",
            "compute_dtype": "bfloat16",
            "threads": 4,
            "pass_cost_tokens": 8192,
            "max_tokens_per_microbatch": case.tokens_per_pass,
            "max_logits_mb": 2048,
            "gradient_checkpointing": False,
        },
    }


def make_model(case: Case, directory: Path, *, device: str, seed: int = 0) -> None:
    """Random weights, drawn on the device."""
    torch.manual_seed(seed)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        model: Any = LlamaForCausalLM(llama_config(case.shape))  # type: ignore[no-untyped-call]  # transformers leaves it untyped
    model.save_pretrained(directory, max_shard_size="4GB")
    build_tokenizer(
        ModelBuildConfig(tokenizer="bytes", chat_template=TEMPLATE, max_position_embeddings=case.shape.max_len)
    ).save_pretrained(str(directory))


class GpuMemory:
    """The largest memory that processes of a run had on the first GPU, read about once a second."""

    def __init__(self) -> None:
        self.total = 0
        self.by_process: dict[str, int] = {}

    def read(self, supervisor: int, _steps: int) -> None:
        gpus = list(driver_gpus())
        if not gpus:
            return
        self.total = max(self.total, gpus[0].used_bytes)
        names = {}
        root = psutil.Process(supervisor)
        for process in (root, *root.children(recursive=True)):
            try:
                names[process.pid] = process_name(process.cmdline())
            except psutil.Error:
                continue
        query = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
        try:
            rows = subprocess.run(query, capture_output=True, text=True, timeout=5, check=False).stdout.splitlines()
        except (OSError, subprocess.TimeoutExpired):
            return
        for row in rows:
            pid, _, used = row.partition(",")
            if pid.strip().isdigit() and used.strip().isdigit():
                # In a container the driver may know processes by other numbers.
                name = names.get(int(pid), f"pid {pid.strip()}")
                self.by_process[name] = max(self.by_process.get(name, 0), int(used) << 20)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    run: LearningRun
    found: Resolution
    memory: GpuMemory

    @property
    def periods(self) -> list[float]:
        """Seconds from one step to the next, after the warm-up."""
        return [b["time"] - a["time"] for a, b in pairwise(self.run.steps[WARM_UP_STEPS - 1 :])]

    @property
    def planned_bytes(self) -> int:
        return 0 if self.found.plan is None else self.found.plan.total(gpu(0))

    @property
    def needed_bytes(self) -> int:
        """Processes of the GPU; of the trainer its tensors, because its allocator keeps what other processes do not need."""
        others = sum(used for name, used in self.memory.by_process.items() if name != "trainer")
        tensors = float(max(row["perf/memory_gb"] for row in self.run.steps)) * GB
        return round(others + tensors + CONTEXT_BYTES)

    def row(self) -> dict[str, Any]:
        steady = self.run.steps[WARM_UP_STEPS:]
        plan = self.found.plan

        def middle(metric: str) -> float | None:
            values = [row[metric] for row in steady if row.get(metric) is not None]
            return round(statistics.median(values), 3) if values else None

        return {
            "name": self.run.name,
            "step_s": round(statistics.median(self.periods), 3),
            "step_s_all": [round(period, 3) for period in self.periods],
            "steps": len(self.run.steps),
            "start_s": round(self.run.start_s, 1),
            "first_step_s": round(self.run.first_step_s, 1),
            "train_s": middle("perf/train_time"),
            "wait_s": middle("perf/sample_wait_time"),
            "publish_wait_s": middle("perf/publish_wait_time"),
            "mfu_in_step": middle("perf/mfu"),
            "tokens_per_step": middle("rollout/response_len"),
            "trainer_tensors_gb": max((row["perf/memory_gb"] for row in self.run.steps), default=None),
            "gpu_gb": round(self.memory.total / GB, 2),
            "gpu_gb_by_process": {name: round(used / GB, 2) for name, used in self.memory.by_process.items()},
            "planned_gb": round(self.planned_bytes / GB, 2),
            "planned_gb_by_process": {}
            if plan is None
            else {name: round(used / GB, 2) for name, used in plan.by_process(gpu(0)).items()},
            "chosen": dict(self.found.chosen),
            "max_lag": self.run.max_lag,
            "audit_ok": self.run.audit_ok,
        }


def measure(name: str, project: Path, overrides: Mapping[str, Mapping[str, Any]], *, seconds: float) -> Measured:
    """One run of the project. Raises `RuntimeError` if it trains too few steps."""
    table = tomllib.loads((project / "run.toml").read_text(encoding="utf-8"))
    for section, values in overrides.items():
        table[section] = {**table.get(section, {}), **values}
    file = project / f"{name}-plan.toml"
    file.write_text(tomli_w.dumps(table), encoding="utf-8")
    found = resolve(load_config(file), this_machine())
    for line in [*found.lines(), *map(str, found.faults())]:
        print_status(f"  {name}: {line}")
    memory = GpuMemory()
    stop = Stop(total_s=max(30.0, seconds - END_S), steps=WARM_UP_STEPS + STEPS)
    run = train(name, table, project, stop, on_poll=memory.read)
    shutil.rmtree(run.directory, ignore_errors=True)
    measured = Measured(run=run, found=found, memory=memory)
    if not measured.periods:
        rows = [{key: row.get(key) for key in ("step", "perf/train_time", "perf/memory_gb")} for row in run.steps]
        raise RuntimeError(
            f"only {len(run.steps)} steps within {seconds:.0f} s, give it more --seconds; {rows}, GPU {memory.by_process}"
        )
    return measured


def figures_of(name: str, ours: Measured, hand: Measured | None) -> list[Figure]:
    step_s = statistics.median(ours.periods)
    figures = []
    if hand is not None:
        peer = statistics.median(hand.periods)
        figures.append(
            Figure(name=f"defaults_{name}", ours=step_s, peer=peer, unit="s a step", ratio=peer / step_s, floor=FLOOR)
        )
    if ours.planned_bytes and ours.memory.by_process:
        used, planned = ours.needed_bytes / GB, ours.planned_bytes / GB
        figures.append(Figure(name=f"memory_{name}", ours=used, peer=planned, unit="GB", ratio=used / planned))
    return figures


def prepare(name: str, case: Case, home: Path) -> Path:
    """The project that a user would have: `rollbook init` with the model, and the lengths of answers."""
    model, project = home / f"model-{name}", home / f"project-{name}"
    began = time.monotonic()
    device = "cuda" if this_machine().gpus else "cpu"
    # In another process, so that this one has no memory on the GPU.
    command = [sys.executable, "-m", "benchmarks.loop.defaults", "--make", name, str(model), device]
    subprocess.run(command, check=True)
    init_project(project, template="single_turn", model=str(model))
    (project / "rollout.py").write_text(ROLLOUT, encoding="utf-8")
    (project / "rewards.py").write_text(REWARDS, encoding="utf-8")
    table = tomllib.loads((project / "run.toml").read_text(encoding="utf-8"))
    table["rollout"] |= {"max_total_tokens": MAX_TOTAL}
    table["rollout"]["sampling"] |= {"max_tokens": LONGEST}
    if case.lora:
        table["trainer"]["lora"] = {"rank": 16}
    (project / "run.toml").write_text(tomli_w.dumps(table), encoding="utf-8")
    print_status(f"{name}: the model is written after {time.monotonic() - began:.0f} s")
    return project


def run_case(
    name: str, home: Path, *, seconds: float, limits: Sequence[float], only: str | None, save: Path | None
) -> list[Figure]:
    began, case = time.monotonic(), CASES[name]
    project = prepare(name, case, home)
    runs: dict[str, dict[str, dict[str, Any]]] = {"defaults": {}, "hand": by_hand(case)}
    if limits:
        runs = {f"limit{limit:g}": {"run": {"gpu_memory_gb": limit}} for limit in limits}
    if only is not None:
        runs = {only: runs[only]}
    results: dict[str, Measured] = {}
    for done, (kind, overrides) in enumerate(runs.items()):
        left = (seconds - (time.monotonic() - began)) / (len(runs) - done)
        try:
            results[kind] = measure(f"{name}-{kind}", project, overrides, seconds=left)
        except RuntimeError as error:  # the other runs are still worth measuring
            print_status(f"{name}-{kind}: {error}")
            continue
        line = json.dumps(results[kind].row())
        print_status(line)
        if save is not None:
            with save.open("a", encoding="utf-8") as file:
                file.write(line + "\n")
    shutil.rmtree(home / f"model-{name}", ignore_errors=True)
    figures = []
    for kind, measured in results.items():
        if kind != "hand":
            label = name if kind == "defaults" else f"{name}-{kind}"
            figures += figures_of(label, measured, results.get("hand") if kind == "defaults" else None)
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=None, choices=list(CASES))
    parser.add_argument("--seconds", type=float, default=130.0, help="about how long a case may take (default: 130)")
    parser.add_argument("--limits", nargs="+", type=float, default=[], help="run.gpu_memory_gb of runs without hand")
    parser.add_argument("--only", choices=["defaults", "hand"], help="one of the two runs of a case")
    parser.add_argument("--home", type=Path, help="folder that keeps what the runs print (default: a temporary one)")
    parser.add_argument("--save", type=Path, help="file to which the line of each run is appended")
    parser.add_argument("--make", nargs=3, metavar=("CASE", "DIR", "DEVICE"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.make is not None:
        name, directory, device = args.make
        make_model(CASES[name], Path(directory), device=device)
        return 0
    names = args.cases or (list(CASES)[1:] if this_machine().gpus else ["cpu"])
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory() as folder:
        home = args.home or Path(folder)
        home.mkdir(parents=True, exist_ok=True)
        for name in names:
            try:
                found = run_case(name, home, seconds=args.seconds, limits=args.limits, only=args.only, save=args.save)
            except (RuntimeError, subprocess.CalledProcessError) as error:
                print_status(f"{name}: {error}")
                continue
            for figure in found:
                print_status(str(figure))
            figures += found
    return print_figures(figures)


if __name__ == "__main__":
    sys.exit(main())
