"""What a user gets without a setting: the run file of `rollbook init` against the best settings by hand, and the memory plan.

    python -m benchmarks.loop.defaults                           135M and 1.5B in full, 4B and 8B with LoRA, on one GPU
    python -m benchmarks.loop.defaults --cases 8b-lora --within 580
    python -m benchmarks.loop.defaults --cases cpu               the same script with a small model, without a GPU
    python -m benchmarks.loop.defaults --tiny                    every kind of run with a tiny model on a CPU, to test the script
    python -m benchmarks.loop.defaults --cases 8b-lora --limits 80 48      runs within `run.gpu_memory_gb`
    python -m benchmarks.loop.defaults --cases 1.5b --parts                generation alone and training alone, too
    python -m benchmarks.loop.defaults --cases 135m 1.5b 8b-lora --mps     each case with an MPS server, too
    python -m benchmarks.loop.defaults --cases 8b-lora --mps --only killed --stepping 400      kills under MPS
    python -m benchmarks.loop.defaults --cases 0.5b-lora --only killed --limits 16             kills, next to other programs
    python -m benchmarks.loop.defaults --cases 135m --sections             with each section of the settings by hand, too

Every run is `rollbook init --template single_turn --model DIR` with 16 groups of 8 answers a step and a staleness bound of 2. Only
the lengths of answers are set: 64 to 512 tokens, the same for all answers to a question. Models have random weights.
A run is stopped `--stepping` seconds after its first trained step, however long its start took. It prints a line of JSON then, and
a case its figures, so that a time limit loses only what was not measured; with `--within`, runs that would not end in time are left
out. `--save` appends the lines to a file.

`defaults_CASE`: seconds a step with the best settings by hand over those without a setting; means, because long and short steps
alternate. `memory_CASE_PROCESS`: memory of the GPU, planned and measured, the smaller over the larger. The plan is that of the
copies that the run made. Measured of the trainer are its tensors, because its allocator keeps what other processes do not need, and
a planned context.

With `--parts`: `parts_CASE`, seconds of generation alone and of training alone over those of a step without a setting; `mfu_CASE`,
of training alone, four operations for a frozen weight. Training is alone in a run with bound 0. Generation is alone in an engine
without a trainer, which has as many answers in flight as the run, of full weights.

Each run says where the time of a step goes (`time`, means in seconds): the trainer trains, or waits for its batch, for the end of
the publication before it, or for the copy of a checkpoint; digest, acknowledgement and publication are concurrent with training;
`played`, `queued` and `batched` are groups, `play` is what the groups that are played and Little's law give for one.

`mps_CASE`: seconds a step without and with an MPS server of the run. With `--mps` only the run `mps` has a server; without it, each
run has one where that is the default. With LoRA: in `--only apart` each process loads its own base.
`--only killed` kills policy server and trainer in turn, with LoRA while they share their base. `killed_CASE_others`: the share of
kills that ended no other process. `killed_CASE_bits`: the share of steps that `rollbook replay --verify` reproduced before a
difference; 0 if a step was trained again with other bits (`diverged_steps`). Ten kills of each need `--stepping 400`.
"""

import argparse
import asyncio
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tomli_w
import torch
from transformers import LlamaForCausalLM

from benchmarks.engine.models import QWEN_1_5B, SMALL, SMOLLM2_135M, TINY, Shape, llama_config, opened
from benchmarks.engine.workloads import LLAMA_8B
from benchmarks.learning.runs import Stop, train
from benchmarks.loop.measured_run import WARM_UP_STEPS, Measured, figures_of, kill_figures
from benchmarks.loop.observers import GpuMemory, GroupPlaces, Kills
from benchmarks.loop.speed import play
from benchmarks.loop.token_rollout import tasks
from benchmarks.report import Figure, print_figures, print_status
from rollbook.commands.training.init import init_project
from rollbook.contracts.policy import Publication, PublicationId
from rollbook.contracts.weights import weights_digest
from rollbook.inference.config import InferenceConfig
from rollbook.inference.weights.safetensors import read_weights
from rollbook.run.config.run import load_config
from rollbook.run.resources.automatic import resolve
from rollbook.run.resources.machine import this_machine
from rollbook.run.resources.memory_plan import gpu
from rollbook.trainer.model.model_directory import build_tokenizer
from rollbook.trainer.model_config import ModelBuildConfig
from tests.parts.run.mps_stand_in import install

PARTS_FLOOR = MPS_FLOOR = 1.0
MFU_FLOOR, LORA_MFU_FLOOR = 0.38, 0.33
PROMPT_TOKENS = 48
MOST_STEPS_OF_KILL = 5
"""Steps from one kill to the next, those that a restarted trainer trains again included."""
START_S, END_S = 60.0, 15.0
"""Expected of a start and of an end, with `--within`."""
MAX_START_S = 200.0
QWEN_0_5B = Shape(layers=24, hidden=896, heads=14, kv_heads=2, ffn=4864, vocab=151_936, max_len=4096)
QWEN_4B = Shape(layers=36, hidden=2560, heads=20, kv_heads=4, ffn=9728, vocab=151_936, max_len=4096)
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"

ROLLOUT = '''"""Answers of random tokens: each has the length that its question draws, and no stop token ends it."""

import random

from rollbook import TO_BE_SCORED, MessageTrajectoryAssembler


def make_rollout(setup):
    async def rollout(row):
        chat = MessageTrajectoryAssembler(setup.tokenizer, setup.sampling)
        chat.add_message("user", row["question"])
        length = random.Random(row["id"]).randint(SHORTEST, LONGEST)
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
    tokens_per_pass: int = 16_384
    """By hand: about a quarter of the GPU."""
    lora: bool = False
    lengths: tuple[int, int] = (64, 512)
    """Tokens of the shortest and of the longest answer."""
    max_total: int = 640
    steps: int = 12
    """Measured steps after which a run is stopped."""


CASES = {
    "tiny": Case(shape=TINY, lengths=(2, 8), max_total=128, steps=2),
    "tiny-lora": Case(shape=TINY, lora=True, lengths=(2, 8), max_total=128, steps=2),
    "cpu": Case(shape=SMALL),
    "cpu-lora": Case(shape=SMALL, lora=True),
    "135m": Case(shape=SMOLLM2_135M, tokens_per_pass=65_536),
    "0.5b": Case(shape=QWEN_0_5B),
    "0.5b-lora": Case(shape=QWEN_0_5B, lora=True),
    "1.5b": Case(shape=QWEN_1_5B),
    "4b-lora": Case(shape=QWEN_4B, tokens_per_pass=8192, lora=True),
    "8b-lora": Case(shape=LLAMA_8B, tokens_per_pass=8192, lora=True),
}
ON_GPU = ("135m", "1.5b", "4b-lora", "8b-lora")
OF_TINY: tuple[tuple[str, list[str]], ...] = (("tiny", []), ("tiny-lora", ["apart", "killed"]))
"""With `--tiny`: cases, and the only runs of each."""


KILLED: dict[str, dict[str, Any]] = {"trainer": {"checkpoint_every": 3}, "run": {"most_quick_deaths": 1000}}
SHARED = {"shared_base": True}
KINDS = ("cold", "defaults", "hand", "apart", "killed", "mps")
SYNCHRONOUS: dict[str, dict[str, Any]] = {"gate": {"max_head_offpolicy_versions": 0}}


def by_hand(case: Case) -> dict[str, dict[str, Any]]:
    """The settings with which `benchmarks.loop.speed` is fast, for this workload: 48 groups of 8 in flight."""
    shape = case.shape
    kv_mb = 1.25e-6 * 48 * 8 * case.max_total * 4 * shape.layers * shape.kv_heads * shape.hidden // shape.heads
    if case.shape in (SMALL, TINY):
        return {}
    return {
        "rollout": {"workers": 8, "groups_per_worker": 16},
        "ledger": {"durability": "process_crash"},
        "inference": {
            "device": "cuda",
            "dtype": "bfloat16",
            "max_running": 384,
            "max_model_len": case.max_total + 8,
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
        model: Any = LlamaForCausalLM(llama_config(case.shape))
    model.save_pretrained(directory, max_shard_size="1TB")  # one file, which `generation_alone` loads
    build_tokenizer(
        ModelBuildConfig(tokenizer="bytes", chat_template=TEMPLATE, max_position_embeddings=case.shape.max_len)
    ).save_pretrained(str(directory))


async def generation_alone(case: Case, model: Path) -> float:
    """Sampled tokens a second of an engine that has as many answers in flight as the run, while it has all of them."""
    settings = {name: value for name, value in by_hand(case).get("inference", {}).items() if name != "transfer"}
    config = InferenceConfig(**settings)
    weights = model / "model.safetensors"
    digest = weights_digest(read_weights(weights).values())
    in_flight = min(config.max_running, 48 * 8)
    workload = {"prompt": PROMPT_TOKENS, "turns": 1, "observation": 0, "vocabulary": case.shape.vocab}
    shortest, longest = case.lengths
    rows = tasks(3 * in_flight, shortest=shortest, longest=longest, **workload)
    publication = Publication(id=PublicationId(1), epoch=1, step=1, digest=digest)
    async with opened(config, model, (publication, weights)) as engine:
        ended = await play(engine, rows, in_flight=in_flight)
    full = ended[in_flight:-in_flight]
    return sum(tokens for _, tokens in full) / (full[-1][0] - ended[in_flight - 1][0])


def measure(
    name: str,
    project: Path,
    overrides: Mapping[str, Mapping[str, Any]],
    *,
    steps: int,
    stepping_s: float,
    kills: int = 0,
) -> Measured:
    """One run of the project. Raises `RuntimeError` if it trains too few steps."""
    table = tomllib.loads((project / "run.toml").read_text(encoding="utf-8"))
    for section, values in overrides.items():
        table[section] = {**table.get(section, {}), **values}
    file = project / f"{name}-plan.toml"
    file.write_text(tomli_w.dumps(table), encoding="utf-8")
    found = resolve(load_config(file), this_machine())
    for line in [*found.lines(), *map(str, found.faults())]:
        print_status(f"  {name}: {line}")
    names = [] if found.plan is None else list(found.plan.by_process(gpu(0)))
    memory, groups = GpuMemory(project / name, names), GroupPlaces(project / name)
    killing = Kills(project / name, kills)

    def on_poll(supervisor: int, steps: int) -> None:
        memory.read(supervisor, steps)
        groups.read(supervisor, steps)
        killing.next(supervisor, steps)

    options: dict[str, Any] = {}
    if found.loaded.config.resources.mps and not this_machine().gpus:
        options = {"module": "tests.parts.run.with_mps", "environment": install(project / "bin")}

    most = WARM_UP_STEPS + steps + MOST_STEPS_OF_KILL * 2 * kills
    stop = Stop(limit_s=stepping_s, steps=most, total_s=MAX_START_S + stepping_s)
    run = train(name, table, project, stop, on_poll=on_poll, **options)
    replayed = reproduced(run.directory) if kills else (0, 0)
    for kept in ("metrics.jsonl", "logs"):
        shutil.move(run.directory / kept, project / f"{name}-{kept}")
    shutil.rmtree(run.directory, ignore_errors=True)
    measured = Measured(run=run, found=found, memory=memory, groups=groups, kills=killing, replayed=replayed)
    if not measured.periods:
        raise RuntimeError(f"only {len(run.steps)} steps in {stepping_s:.0f} s, give it more --stepping")
    return measured


def reproduced(run: Path) -> tuple[int, int]:
    """Steps with the recorded bits in a replay, and all steps that are compared."""
    command = [sys.executable, "-m", "rollbook", "replay", str(run), "--verify", "--json"]
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if not ended.stdout.strip():
        return 0, 1  # it could not be replayed; its error is on stderr
    report = json.loads(ended.stdout)
    steps, diverged_at = report["steps"], report["diverged_at"]
    return steps if diverged_at is None else diverged_at - 1, steps


def parts_of(name: str, case: Case, ours: Measured, synchronous: Measured, model: Path) -> list[Figure]:
    command = [sys.executable, "-m", "benchmarks.loop.defaults", "--alone", name, str(model)]
    rate = float(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()[-1])

    def mean(measured: Measured, metric: str) -> float:
        return statistics.fmean(row[metric] or 0.0 for row in measured.steady)

    training_s = mean(synchronous, "perf/train_time")
    generation_s = mean(ours, "rollout/response_len") * mean(ours, "rollout/samples") / rate
    step_s, parts_s = statistics.fmean(ours.periods), generation_s + training_s
    alone = {"generation_s": round(generation_s, 3), "training_s": round(training_s, 3), "engine_tokens_s": round(rate)}
    floor = LORA_MFU_FLOOR if case.lora else MFU_FLOOR
    mfu = statistics.median(row["perf/mfu"] or 0.0 for row in synchronous.steady)
    return [
        Figure(
            name=f"parts_{name}",
            ours=step_s,
            peer=parts_s,
            unit="s a step",
            ratio=parts_s / step_s,
            floor=PARTS_FLOOR,
            more=alone,
        ),
        Figure(name=f"mfu_{name}", ours=mfu, peer=1.0, unit="of the peak", ratio=mfu, floor=floor),
    ]


def prepare(name: str, case: Case, home: Path) -> Path:
    """The project that a user would have: `rollbook init` with the model, and the lengths of answers."""
    home.mkdir(parents=True, exist_ok=True)
    model, project = home / f"model-{name}", home / f"project-{name}"
    began = time.monotonic()
    device = "cuda" if this_machine().gpus else "cpu"
    # In another process, so that this one has no memory on the GPU.
    command = [sys.executable, "-m", "benchmarks.loop.defaults", "--make", name, str(model), device]
    subprocess.run(command, check=True)
    init_project(project, template="single_turn", model=str(model))
    constants = "SHORTEST, LONGEST = {}, {}\n".format(*case.lengths)
    (project / "rollout.py").write_text(f"{ROLLOUT}\n\n{constants}", encoding="utf-8")
    (project / "rewards.py").write_text(REWARDS, encoding="utf-8")
    table = tomllib.loads((project / "run.toml").read_text(encoding="utf-8"))
    table["rollout"] |= {"max_total_tokens": case.max_total}
    table["rollout"]["sampling"] |= {"max_tokens": case.lengths[1]}
    if case.lora:
        table["trainer"]["lora"] = {"rank": 16}
    (project / "run.toml").write_text(tomli_w.dumps(table), encoding="utf-8")
    print_status(f"{name}: the model is written after {time.monotonic() - began:.0f} s")
    return project


def runs_of(
    case: Case, *, limits: Sequence[float], only: Sequence[str], has_mps: bool, has_sections: bool
) -> dict[str, dict[str, dict[str, Any]]]:
    """The runs of a case by kind, with the settings in which they differ from the run file of `rollbook init`.

    `cold` compiles kernels. Its steps are not compared: those of the first run on a machine were 1.2 times as long.
    """
    found: dict[str, dict[str, dict[str, Any]]] = {"cold": {}} if by_hand(case) else {}  # a CPU has nothing to compile
    compared: dict[str, dict[str, Any]] = {"resources": {"mps": False}} if has_mps else {}
    found |= {"defaults": compared, "hand": {**by_hand(case), **compared}}
    within: dict[str, dict[str, Any]] = {f"limit{limit:g}": {"run": {"gpu_memory_gb": limit}} for limit in limits}
    if within and not only:
        return within
    if has_mps:
        found["mps"] = {"resources": {"mps": True}}
    if has_sections:
        found |= {section: {section: values, **compared} for section, values in by_hand(case).items()}
    if not only:
        return found
    resources = {**(SHARED if case.lora else {}), "mps": has_mps}
    others = {
        "apart": {"resources": {"shared_base": False}},
        "killed": {**KILLED, "resources": resources},
    }
    limit = next(iter(within.values()), {}).get("run", {})
    chosen = {name: settings for name, settings in {**found, **others}.items() if name in only}
    return {name: {**settings, "run": {**settings.get("run", {}), **limit}} for name, settings in chosen.items()}


def run_figures(name: str, kind: str, results: Mapping[str, Measured], *, has_mps: bool) -> list[Figure]:
    """Those of one run, which may need another one of the same case. A cold one, one by hand and one with bound 0 have none."""
    ours = results[kind]
    if kind in {"cold", "hand", "synchronous"}:
        return []
    if kind == "defaults":
        return figures_of(name, ours, results.get("hand"))
    figures = figures_of(f"{name}-{kind}", ours, None)
    if kind == "killed":
        figures += kill_figures(f"{name}{'_mps' if has_mps else ''}", ours)
    if kind == "mps" and "defaults" in results:
        step_s, peer = (statistics.fmean(measured.periods) for measured in (ours, results["defaults"]))
        figures.append(
            Figure(name=f"mps_{name}", ours=step_s, peer=peer, unit="s a step", ratio=peer / step_s, floor=MPS_FLOOR)
        )
    return figures


def run_case(
    name: str,
    home: Path,
    *,
    stepping_s: float,
    until: float,
    limits: Sequence[float],
    only: Sequence[str],
    kills: int,
    has_parts: bool,
    has_mps: bool,
    has_sections: bool,
    save: Path | None,
) -> list[Figure]:
    """`until`: the time of the monotonic clock after which no run is started that would not end before it."""
    case = CASES[name]
    project = prepare(name, case, home)
    os.sync()  # the model's file, which the first run would wait for at each commit
    runs = runs_of(case, limits=limits, only=only, has_mps=has_mps, has_sections=has_sections)
    if has_parts:
        runs["synchronous"] = SYNCHRONOUS
    results: dict[str, Measured] = {}
    for kind, overrides in runs.items():
        if time.monotonic() + START_S + stepping_s + END_S > until:
            print_status(f"{name}-{kind}: left out, too little time is left")
            continue
        try:
            rounds = kills if kind == "killed" else 0
            steps = 1 if kind == "cold" else case.steps
            results[kind] = measure(
                f"{name}-{kind}", project, overrides, steps=steps, stepping_s=stepping_s, kills=rounds
            )
        except RuntimeError as error:  # the other runs are still worth measuring
            print_status(f"{name}-{kind}: {error}")
            continue
        print_status(f"  {name}-{kind}: {results[kind].time}")
        line = json.dumps(results[kind].row())
        print_status(line)
        if save is not None:
            with save.open("a", encoding="utf-8") as file:
                file.write(line + "\n")
    figures = [figure for kind in results for figure in run_figures(name, kind, results, has_mps=has_mps)]
    if {"defaults", "synchronous"} <= results.keys():
        figures += parts_of(name, case, results["defaults"], results["synchronous"], home / f"model-{name}")
    shutil.rmtree(home / f"model-{name}", ignore_errors=True)
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=None, choices=list(CASES))
    parser.add_argument("--tiny", action="store_true", help="every kind of run on a CPU; the figures mean nothing")
    parser.add_argument("--stepping", type=float, default=30.0, help="seconds of steps in each run (default: 30)")
    parser.add_argument("--within", type=float, default=1e9, help="seconds for everything")
    parser.add_argument(
        "--limits",
        nargs="+",
        type=float,
        default=[],
        help="run.gpu_memory_gb of runs without hand, or of --only (the first)",
    )
    parser.add_argument("--only", nargs="+", default=[], choices=KINDS, help="only these runs of a case")
    parser.add_argument(
        "--mps", action="store_true", help="a run with an MPS server, too; with `--only killed`: under it"
    )
    parser.add_argument("--parts", action="store_true", help="generation alone and training alone, too")
    parser.add_argument("--sections", action="store_true", help="runs with one section of the settings by hand, too")
    parser.add_argument("--kills", type=int, default=10, help="kills of each process in the run `killed`")
    parser.add_argument("--home", type=Path, help="folder that keeps what the runs print (default: a temporary one)")
    parser.add_argument("--save", type=Path, help="file to which the line of each run is appended")
    parser.add_argument("--alone", nargs=2, metavar=("CASE", "MODEL"), help=argparse.SUPPRESS)
    parser.add_argument("--make", nargs=3, metavar=("CASE", "DIR", "DEVICE"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.make is not None:
        name, directory, device = args.make
        make_model(CASES[name], Path(directory), device=device)
        return 0
    if args.alone is not None:
        name, directory = args.alone
        print(asyncio.run(generation_alone(CASES[name], Path(directory))))
        return 0
    names = args.cases or (list(ON_GPU) if this_machine().gpus else ["cpu"])
    chosen = OF_TINY if args.tiny else [(name, args.only) for name in names]
    kills = 1 if args.tiny else args.kills
    until = time.monotonic() + args.within
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory() as folder:
        home = args.home or Path(folder)
        home.mkdir(parents=True, exist_ok=True)
        for name, only in chosen:
            options = {
                "stepping_s": args.stepping,
                "until": until,
                "limits": args.limits,
                "has_parts": args.parts or (args.tiny and not only),
                "has_mps": args.mps or args.tiny,
                "has_sections": args.sections,
            }
            try:
                found = run_case(
                    name, home / f"{name}-{'-'.join(only) or 'all'}", **options, only=only, kills=kills, save=args.save
                )
            except (RuntimeError, subprocess.CalledProcessError) as error:
                print_status(f"{name}: {error}")
                continue
            for figure in found:
                print_status(json.dumps(asdict(figure)))
            figures += found
    return print_figures(figures)


if __name__ == "__main__":
    sys.exit(main())
