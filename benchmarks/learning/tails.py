"""Learning with heavy tails: number guessing with episodes of log-normal duration, one batch policy against the others.

Every policy trains for the same wall time with the same seeds. Then the final policy is evaluated on plain games. At equal samples,
a policy must not learn less than `wait`, which trains everything, and must not drift towards shorter or longer episodes.

With `--task coin` the reward is random, and the agent only decides how long an episode lasts. Then no policy may change the mean
length: a selection by speed would.

`--bounds` repeats everything with these staleness bounds. In flight are as many groups as a bound allows, so a larger one masks
less of the first turns of slow episodes, and trains older tokens:

    python -m benchmarks.learning.tails --policies parts trim wait --bounds 1 2 4 --seconds 110 --cores 1 --runs-each 2 --minutes 7

Runs share sets of cores, as many on each (`--cores`, `--runs-each`), so that every policy has the same machine. The same command
continues with the runs that are missing.
"""

import argparse
import functools
import itertools
import json
import shutil
import statistics
import sys
import tempfile
import threading
import time
import tomllib
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from benchmarks.learning.runs import LearningRun, Stop, save, train
from benchmarks.pinned_jobs import run_pinned
from benchmarks.report import Figure, print_figures, print_status
from rollbook.contracts.freshness import BatchPolicy
from rollbook.envs.builtin.number_guessing import NumberGuessing, number_guessing_tasks
from rollbook.rollout.chat.tokenizer import ModelTokenizer
from rollbook.run.directory import RunDirectory
from rollbook.trainer.model.policy_model import PolicyModel

MODULE = Path(__file__).with_name("tails_rollout.py")
EVALUATION_EPISODES = 64
"""Of each secret."""
START_S = 30.0
"""Expected time to start and stop a run and to evaluate its policy."""
_loading = threading.Lock()
"""transformers cannot load two models at the same time in one process."""
PARTS_OF_RUN = 10
"""Learning curves are compared in this many equal parts of the samples that all runs have trained."""


Kind = tuple[BatchPolicy, int]
"""Batch policy and staleness bound."""


def config_table(kind: Kind, *, task: str, seed: int, mean_s: float, shape: float) -> dict[str, Any]:
    """The configuration of `rollbook demo`, with slow episodes and another batch policy."""
    policy, bound = kind
    table = tomllib.loads((resources.files("rollbook.demo") / "run.toml").read_text(encoding="utf-8"))
    table["run"] = {"name": f"tails-{policy}-{seed}", "seed": seed}
    game = table["env"]["args"] if task == "guessing" else {}
    environment = "TailedGuessing" if task == "guessing" else "TailedCoin"
    table["env"] = {"name": f"tails_rollout:{environment}", "args": {"mean_s": mean_s, "shape": shape, **game}}
    if task == "coin":
        table["rollout"]["function"] = "tails_rollout"
        table["rollout"]["max_turns"] = 12
    table["rollout"] |= {"max_seconds": 500.0, "step_s": 500.0}
    groups = table["gate"]["groups_per_step"]
    table["gate"] |= {"batch_policy": str(policy), "group_deadline_s": 1000.0}
    table["gate"] |= {"max_head_offpolicy_versions": bound, "max_groups_in_flight": groups * (bound + 1)}
    table["inference"]["max_running"] = 512
    table["trainer"] |= {"max_steps": 100_000, "schedule": "constant", "checkpoint_every": 1000}
    return table


def run_one(kind: Kind, seed: int, args: argparse.Namespace, *, until: float) -> dict[str, Any] | None:
    """None if the run would not end in time."""
    if time.monotonic() + args.seconds + START_S > until:
        return None
    with tempfile.TemporaryDirectory(prefix="rollbook-tails-") as home:
        return measure(Path(home), kind, seed, args)


def measure(home: Path, kind: Kind, seed: int, args: argparse.Namespace) -> dict[str, Any]:
    name = f"{kind[0]}-bound-{kind[1]}-seed-{seed}"
    for module in (MODULE, resources.files("rollbook.demo") / "number_guessing.py"):
        shutil.copy(str(module), home)
    table = config_table(kind, task=args.task, seed=seed, mean_s=args.mean_s, shape=args.shape)
    run = train(name, table, home, Stop(limit_s=args.seconds, steps=args.steps, needs_checkpoint=True))
    found = {
        **key_of(kind, seed, args),
        "trained_steps": len(run.steps),
        "samples": int(sum(row["rollout/samples"] for row in run.steps)),
        "masked": mean([row["async/masked_share"] or 0.0 for row in run.steps]),
        "dropped": run.dropped,
        "audit_ok": run.audit_ok,
        "max_lag": run.max_lag,
        "curve": curve(run),
        "solved": plain_solve_rate(run, table) if args.task == "guessing" else None,
    }
    print_status(
        f"{name}: {found['trained_steps']} steps, {found['samples']} samples, masked {found['masked']:.1%}, "
        f"solved in a plain evaluation {found['solved']}"
    )
    return found


def key_of(kind: Kind, seed: int, args: argparse.Namespace) -> dict[str, Any]:
    """What tells runs in a report apart."""
    workload = {name: getattr(args, name) for name in ("task", "seconds", "steps", "mean_s", "shape")}
    return {"policy": str(kind[0]), "bound": kind[1], "seed": seed, **workload}


def curve(run: LearningRun) -> list[tuple[int, float, float]]:
    """Samples trained so far, mean reward and mean length of each step."""
    total, rows = 0, []
    for row in run.steps:
        total += int(row["rollout/samples"])
        rows.append((total, float(row["rollout/reward"]), float(row["rollout/response_len"])))
    return rows


@torch.inference_mode()
def plain_solve_rate(run: LearningRun, table: Mapping[str, Any]) -> float:
    """The solved fraction of sampled games without tails. All games are played in this process, turn by turn.

    `rollbook eval` plays the same games, but starts three processes for them.
    """
    models = RunDirectory(run.directory).checkpoint_models()
    directory = models[max(models)]
    with _loading:
        model = PolicyModel.load(directory).module.eval()
    tokenizer = ModelTokenizer.from_directory(directory)
    game = {name: value for name, value in table["env"]["args"].items() if name not in ("mean_s", "shape")}
    playing: list[tuple[NumberGuessing, list[int]]] = []
    tasks = number_guessing_tasks(**table["tasks"]["args"], copies=EVALUATION_EPISODES)
    for task in tasks:
        env = NumberGuessing(**game)
        env.reset(task)
        playing.append((env, list(tokenizer.encode("<bos>"))))
    num_solved = 0
    while playing:
        logits_BV = model(input_ids=torch.tensor([ids for _, ids in playing])).logits[:, -1].float()
        guesses = torch.multinomial(logits_BV.softmax(-1), 1)[:, 0].tolist()
        going_on = []
        for (env, ids), guess in zip(playing, guesses, strict=True):
            seen = env.step(tokenizer.decode([guess]))
            if not seen.done:
                going_on.append((env, [*ids, guess, *tokenizer.encode(seen.text)]))
            num_solved += bool(seen.solved)
        playing = going_on
    return num_solved / len(tasks)


def at_equal_samples(found: Sequence[dict[str, Any]], column: int) -> dict[str, list[float]]:
    """By policy: the mean of a column of the curve in the last part of the samples that every run has trained, for each seed."""
    common = min(run["samples"] for run in found)
    means: dict[str, list[float]] = {}
    for run in found:
        last = [row[column] for row in run["curve"] if common * (PARTS_OF_RUN - 1) / PARTS_OF_RUN <= row[0] <= common]
        means.setdefault(name_of(run), []).append(mean(last))
    return means


def figures_of(found: Sequence[dict[str, Any]]) -> list[Figure]:
    """`parts` with the first bound against all others: final solve rate at equal time, reward and length at equal samples."""
    solved: dict[str, list[float]] = {}
    for run in found:
        if run["solved"] is not None:
            solved.setdefault(name_of(run), []).append(run["solved"])
    measures = {
        "solved at equal time": solved,
        "reward at equal samples": at_equal_samples(found, 1),
        "length at equal samples": at_equal_samples(found, 2),
    }
    first = min((run["bound"] for run in found if run["policy"] == "parts"), default=0)
    ours = f"parts, bound {first}"
    return [
        Figure(
            name=f"{measure}, {ours} / {other}",
            ours=mean(by_policy[ours]),
            peer=mean(by_policy[other]),
            unit="",
            ratio=mean(by_policy[ours]) / mean(by_policy[other]) if mean(by_policy[other]) else float("nan"),
            more={ours: by_policy[ours], other: by_policy[other]},
        )
        for measure, by_policy in measures.items()
        for other in by_policy
        if other != ours and ours in by_policy
    ]


def name_of(run: Mapping[str, Any]) -> str:
    return f"{run['policy']}, bound {run['bound']}"


def mean(values: Sequence[float]) -> float:
    return statistics.fmean(values) if values else float("nan")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policies", nargs="+", default=list(BatchPolicy), choices=list(BatchPolicy))
    parser.add_argument("--bounds", type=int, nargs="+", default=[2], help="staleness bounds")
    parser.add_argument("--task", choices=["guessing", "coin"], default="guessing")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--seconds", type=float, default=270.0, help="wall time of each run, from its first step")
    parser.add_argument("--steps", type=int, default=1_000_000, help="steps of each run, if it has time for them")
    parser.add_argument("--mean-s", type=float, default=1.0, help="mean duration of an episode")
    parser.add_argument("--shape", type=float, default=1.0, help="sigma of the logarithm of a duration")
    parser.add_argument("--cores", type=int, default=2, help="cores of a set")
    parser.add_argument("--runs-each", type=int, default=1, help="runs at once on a set of cores")
    parser.add_argument("--minutes", type=float, default=600.0, help="start no run that would end after this time")
    parser.add_argument("--out", type=Path, default=Path("runs/tails.json"), help="the learning curves")
    args = parser.parse_args()
    torch.set_num_threads(1)
    found: list[dict[str, Any]] = json.loads(args.out.read_bytes()) if args.out.exists() else []
    until = time.monotonic() + args.minutes * 60
    jobs = [
        functools.partial(run_one, kind, seed, args, until=until)
        for seed in args.seeds
        for kind in itertools.product(map(BatchPolicy, args.policies), args.bounds)
        if not any(key_of(kind, seed, args).items() <= run.items() for run in found)
    ]
    num_failed = num_late = 0
    for job in run_pinned(jobs, cores_each=args.cores, jobs_each=args.runs_each):
        if (error := job.exception()) is not None:
            num_failed += 1
            print_status(f"failed: {error}")
        elif (run := job.result()) is None:
            num_late += 1
        else:
            found.append(run)
            save(args.out, found)
    print_status(f"{len(found)} runs measured, {num_failed} failed, {num_late} left for the next call")
    return (print_figures(figures_of(found)) if found else 1) or (1 if num_failed or num_late else 0)


if __name__ == "__main__":
    sys.exit(main())
