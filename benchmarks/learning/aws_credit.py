"""Episode credit, turn credit and a teacher in the AWS world: three seeds each, from one warm start.

    python -m benchmarks.learning.aws_credit --model models/smollm2 --minutes 10 --out runs/aws-credit
    python -m benchmarks.learning.aws_credit --small --out runs/aws-credit-small     # 0.4 million parameters, on a CPU

The tasks, demonstrations and settings are those of `examples/09_aws_smollm2` (`--small`: `examples/04_aws_agent_learns`). The
policy begins after a short warm start. The teacher is the same model after more steps on the same demonstrations; `rollbook policy
serve` serves it on `--teacher-port`. All cells have whole groups and the same rewards: each command earns what it brings the cloud
closer to the goal. A call ends after about `--minutes`; the same command continues, and ended stages and runs are kept. The report
is that of `rollbook study`: solved held-out tasks at equal samples and at equal time, with intervals over seeds.
"""

import argparse
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w

from benchmarks.report import print_status
from rollbook.run.config.study import toml_value

EXAMPLES = Path(__file__).parents[2] / "examples"
STOP_S = 90.0
"""For a checkpoint and the end of all processes, after the time limit."""
START_S = 300.0
"""For the server of the teacher to load its model."""
TOP_K = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    example: str
    prepare: tuple[str, ...]
    warm_steps: int
    """Steps on demonstrations before the runs. The teacher has `teacher_steps`."""
    teacher_steps: int
    warm: dict[str, Any]
    """Settings of both supervised trainings. `{out}` is the output folder."""
    settings: dict[str, Any]
    """Settings of all runs."""


LARGE = Size(
    example="09_aws_smollm2",
    prepare=("prepare_clouds.py", "--clouds", "8"),
    warm_steps=60,
    teacher_steps=400,
    warm={"sft.data": "{out}/data/demonstrations.jsonl", "sft.epochs": 20},
    settings={
        "tasks.source": "{out}/data/train.jsonl",
        "evaluation.source": "{out}/data/held_out.jsonl",
        "evaluation.max_tasks": 200,
        "evaluation.every_steps": 20,
        # Without partial credit, all of the reward is in the last turn, and both kinds of credit are nearly the same.
        "env.args": {"base_port": 0, "partial": 0.3},
        "trainer.checkpoint_every": 10,
    },
)
SMALL = Size(
    example="04_aws_agent_learns",
    prepare=("prepare.py", "--clouds", "2", "--each", "8", "--renamed", "20"),
    warm_steps=200,
    teacher_steps=400,
    warm={"model.path": "{out}/data/model", "sft.data": "{out}/data/demonstrations.jsonl", "sft.epochs": 50},
    settings={
        "tasks.args": {"split": "train", "count": 2, "seed": 5},
        "evaluation.args": {"split": "test", "count": 1, "seed": 9},
        "evaluation.max_tasks": 6,
        "evaluation.episodes": 1,
        "evaluation.every_steps": 3,
        "evaluation.concurrency": 4,
        "env.pool_size": 8,
        "rollout.completions_per_prompt": 4,
        "rollout.drop_constant_reward": False,
        "gate.groups_per_step": 2,
        "trainer.checkpoint_every": 2,
    },
)


def cells(url: str) -> list[dict[str, Any]]:
    teacher = {"url": url, "model": "teacher", "top_k": TOP_K}
    taught = {"distill_kl": "forward"}
    return [
        {"name": "episode credit", "trainer": {"advantage": "rloo"}},
        {"name": "turn credit", "trainer": {"advantage": "turn_rloo"}},
        {"name": "teacher", "trainer": {"loss": "distill", **taught}, "rollout": {"teacher": teacher}},
        {
            "name": "episode credit and teacher",
            "trainer": {"advantage": "rloo", "distill_coef": 0.5, **taught},
            "rollout": {"teacher": teacher},
        },
    ]


def measure(args: argparse.Namespace) -> int:
    size: Size = SMALL if args.small else LARGE
    out: Path = args.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    until = time.monotonic() + 60 * args.minutes
    example = EXAMPLES / size.example
    if not (out / "prepared").exists():
        script, *options = size.prepare
        print_status("playing reference solutions for demonstrations")
        subprocess.run([sys.executable, str(example / script), *options, "--to", str(out / "data")], check=True)
        (out / "prepared").touch()
    warm = {**size.warm, **({} if args.small else {"model.path": str(args.model.resolve())})}
    for name, steps in (("policy", size.warm_steps), ("teacher", size.teacher_steps)):
        if not (out / name / "final").is_dir():
            print_status(f"{name}: {steps} steps on demonstrations")
            values = {**warm, "trainer.max_steps": steps}.items()
            sets = [part for key, value in values for part in ("--set", f"{key}={toml_value(_below(out, value))}")]
            if not _ended(["sft", str(example / "sft.toml"), "--out", str(out / name), *sets], until):
                return 1
    study = write_study(size, out, steps=args.steps, seeds=args.seeds, port=args.teacher_port, only=args.cells)
    with served(out, args.teacher_port):
        minutes = max(0.1, (until - time.monotonic()) / 60)
        more = [part for text in args.set for part in ("--set", text)]
        options = ["--out", str(out / "study"), "--minutes", f"{minutes:.2f}", "--jobs", str(args.jobs)]
        command = ["study", str(study), *options, *more]
        is_ended = _ended(command, until + STOP_S)
    report = out / "study" / "report" / "report.md"
    if report.exists():
        sys.stdout.write(report.read_text(encoding="utf-8"))
    return 0 if is_ended else 1


def write_study(size: Size, out: Path, *, steps: int, seeds: int, port: int, only: Sequence[str] | None = None) -> Path:
    """The file of the study: the kinds of credit in `only` (None: all), with each seed."""
    url = f"http://127.0.0.1:{port}/v1"
    settings = {
        **size.settings,
        "model.path": "{out}/policy/final",
        "trainer.max_steps": steps,
        "evaluation.policy": "shared",
        "gate.batch_policy": "trim",
    }
    table = {
        "study": {
            "name": "aws-credit",
            "config": str(EXAMPLES / size.example / "run.toml"),
            "seeds": list(range(seeds)),
        },
        "settings": {name: _below(out, value) for name, value in settings.items()},
        "grid": {"credit": [cell for cell in cells(url) if only is None or cell["name"] in only]},
    }
    path = out / "study.toml"
    path.write_text(tomli_w.dumps(table), encoding="utf-8")
    return path


def _below(out: Path, value: Any) -> Any:
    return value.replace("{out}", str(out)) if isinstance(value, str) else value


def _ended(arguments: Sequence[str], until: float) -> bool:
    """Run a command of Rollbook, and interrupt it at the time limit. Returns whether it ended by itself."""
    child = subprocess.Popen([sys.executable, "-m", "rollbook", *arguments])
    try:
        child.wait(max(1.0, until - time.monotonic()))
    except subprocess.TimeoutExpired:
        print_status("the time limit is reached; the same command continues")
        child.send_signal(signal.SIGINT)
        child.wait()
        return False
    if child.returncode not in (0, 130):
        raise RuntimeError(f"rollbook {arguments[0]} failed with exit code {child.returncode}")
    return child.returncode == 0


@contextmanager
def served(out: Path, port: int) -> Iterator[None]:
    """The teacher on its port."""
    ready = out / "teacher.ready"
    ready.unlink(missing_ok=True)
    options = ["--model", str(out / "teacher" / "final"), "--served-model-name", "teacher", "--port", str(port)]
    command = [sys.executable, "-m", "rollbook", "policy", "serve", *options, "--ready-file", str(ready)]
    with (out / "teacher.log").open("w") as log, subprocess.Popen(command, stdout=log, stderr=log) as server:
        try:
            limit = time.monotonic() + START_S
            while not ready.exists():
                if server.poll() is not None or time.monotonic() > limit:
                    raise RuntimeError(f"the server of the teacher did not start: {out / 'teacher.log'}")
                time.sleep(0.1)
            yield
        finally:
            server.send_signal(signal.SIGTERM)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", type=Path, help="SmolLM2-135M-Instruct: rollbook models get smollm2 --to models/smollm2"
    )
    parser.add_argument("--small", action="store_true", help="a small model on a CPU")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=1e4, help="end this call after so many minutes")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, help="default: 100, or 6 with --small")
    parser.add_argument("--jobs", type=int, default=1, help="runs at once; on a GPU each needs run.gpu_memory_gb")
    names = [cell["name"] for cell in cells("")]
    parser.add_argument("--cells", nargs="+", choices=names, default=names, help="only these kinds of credit")
    parser.add_argument("--teacher-port", type=int, default=8171)
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.FIELD=VALUE", help="of all runs")
    args = parser.parse_args()
    if args.model is None and not args.small:
        parser.error("--model is required, or --small")
    args.steps = args.steps or (6 if args.small else 100)
    return measure(args)


if __name__ == "__main__":
    sys.exit(main())
