"""Out of memory, provoked in each process of a run on a GPU: what the user saw, after how many seconds, and how the run went on.

    python -m benchmarks.loop.out_of_memory                    all cases, four at a time, on one GPU; under 3 minutes
    python -m benchmarks.loop.out_of_memory --cases optimizer publication
    python -m benchmarks.loop.out_of_memory --tiny             all cases on a CPU, to test the script

The run is that of `benchmarks.loop.defaults` with 135M parameters. Each case gives one process less memory than it needs, by
settings that the memory plan does not change. Ours: seconds until the run had ended, with advice or trained. With `--tiny`, code
that every process of the run executes at its start raises the error instead.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w

from benchmarks.learning.runs import train_command
from benchmarks.loop.defaults import CASES as MODELS
from benchmarks.loop.defaults import prepare
from benchmarks.report import Figure, print_figures, print_status
from rollbook.telemetry.metrics import read_metrics

STEPS, AT_ONCE, LIMIT_S, END_S = 2, 4, 150.0, 60.0
"""`END_S`: within which a run that cannot go on must have ended, after its processes have started."""
SHOWN_LINES = 8
WEIGHTS_GB = 0.27
"""The model in bfloat16. A trainer holds three times that before its first step, and seven with gradients and optimizer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Provoked:
    what: str
    settings: Mapping[str, Mapping[str, Any]]
    goes_on: bool = False
    planted: str = ""
    """What runs out of memory with `--tiny`. Empty: nothing, because a CPU has no second copy, or the plan refuses the run."""


CAUSE = "CUDA out of memory. Tried to allocate 61.00 GiB"
PLANTED = f"""
import torch

def fail(*args, **options):
    raise torch.OutOfMemoryError({CAUSE!r})

async def fail_later(*args, **options):
    fail()
"""
NEVER_LESS = 10**12
"""Checkpoints to keep: no disk has room for them."""
CASES = {
    "plan": Provoked(what="the whole run", settings={"run": {"gpu_memory_gb": 2.0}}),
    "loading": Provoked(
        what="the policy server loads the model",
        settings={"inference": {"gpu_memory_gb": 0.6 * WEIGHTS_GB}},
        planted="""
import rollbook.inference.engines.embedded.build as build
build.load_module = fail
""",
    ),
    "cache": Provoked(
        what="the policy server allocates its cache",
        settings={"inference": {"gpu_memory_gb": 1.0, "kv_memory_mb": 3000.0}},
        planted="""
from rollbook.inference.engines.embedded.runner import Runner
Runner.warm_up = fail
""",
    ),
    "update": Provoked(
        what="the policy server stages an update of all weights",
        settings={"inference": {"gpu_memory_gb": 1.25, "kv_memory_mb": 500.0, "transfer": "shared_memory"}},
        goes_on=True,
    ),
    "adapter": Provoked(
        what="the policy server applies an adapter",
        settings={
            "trainer": {"lora": {"rank": 1024}},
            "inference": {"gpu_memory_gb": 1.2, "kv_memory_mb": 500.0},
            "resources": {"shared_base": False},
        },
        planted="""
from rollbook.inference.engines.embedded.live_weights import LiveWeights
LiveWeights.plan_adapter = fail
""",
    ),
    "trainer": Provoked(
        what="the trainer loads the model",
        settings={"trainer": {"gpu_memory_gb": WEIGHTS_GB}},
        planted="""
from rollbook.trainer.model.policy_model import PolicyModel
PolicyModel.load = fail
""",
    ),
    "publication": Provoked(
        what="the trainer copies its weights for a publication",
        settings={"trainer": {"gpu_memory_gb": 3.9 * WEIGHTS_GB}, "inference": {"transfer": "cuda_ipc"}},
        planted="""
from rollbook.inference.weights.transports.files import FileTransport
FileTransport.put = fail_later
""",
    ),
    "optimizer": Provoked(
        what="the trainer allocates the state of the optimizer",
        settings={"trainer": {"gpu_memory_gb": 6.0 * WEIGHTS_GB}, "inference": {"transfer": "shared_memory"}},
        planted="""
import sys
allocate = torch.zeros_like

def zeros_like(*args, **options):
    callers = {sys._getframe(number).f_code.co_name for number in (1, 2, 3)}
    return fail() if "allocate_state" in callers else allocate(*args, **options)

torch.zeros_like = zeros_like
""",
    ),
    "passes": Provoked(
        what="the trainer trains large passes",
        settings={
            "trainer": {"gpu_memory_gb": 8.0, "max_tokens_per_microbatch": 60_000, "gradient_checkpointing": False}
        },
        goes_on=True,
        planted="""
from rollbook.trainer.model.policy_model import PolicyModel
compute = PolicyModel.token_logprobs

def token_logprobs(self, micro, **options):
    return fail() if micro.inputs_BT.size > 600 else compute(self, micro, **options)

PolicyModel.token_logprobs = token_logprobs
""",
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What the user saw of a run."""

    seconds: float
    steps: int
    code: int | None
    """None: it was killed, because it did not end."""
    text: str

    @property
    def ending(self) -> list[str]:
        """From the line that says how the run ended."""
        lines = [line.rstrip() for line in self.text.splitlines()]
        starts = [
            n for n, line in enumerate(lines) if line.startswith(("failed:", "finished:")) or "GB are missing" in line
        ]
        return lines[starts[0] : starts[0] + SHOWN_LINES] if starts else lines[-SHOWN_LINES:]

    @property
    def noticed(self) -> list[str]:
        """What was printed about memory while the run went on."""
        return [line.strip() for line in self.text.splitlines() if "did not fit" in line or "in pieces" in line][:2]

    def is_good(self, case: Provoked) -> bool:
        if case.goes_on:
            return self.code == 0 and self.steps >= STEPS
        shown = "\n".join(self.ending)
        return (
            self.code not in (0, None)
            and " GB" in shown
            and "Traceback" not in self.text
            and ("saves" in shown or "lower " in shown.lower())
        )


def provoke(name: str, project: Path, *, is_tiny: bool) -> Seen:
    case, environment = CASES[name], dict(os.environ)
    settings = case.settings
    if is_tiny:
        settings = {"trainer": {"keep_checkpoints": NEVER_LESS}} if name == "plan" else {}
        settings = {"trainer": {"lora": {"rank": 4}}} if name == "adapter" else settings
        planted = project / f"planted-{name}"
        planted.mkdir()
        (planted / "sitecustomize.py").write_text(PLANTED + case.planted, encoding="utf-8")
        environment["PYTHONPATH"] = os.pathsep.join([str(planted), environment.get("PYTHONPATH", str(Path.cwd()))])
    table = tomllib.loads((project / "run.toml").read_text(encoding="utf-8"))
    table.pop("evaluation", None)
    table["trainer"] |= {"max_steps": STEPS}
    for section, values in settings.items():
        table[section] = {**table.get(section, {}), **values}
    source, directory = project / f"{name}.toml", project / f"run-{name}"
    source.write_text(tomli_w.dumps(table), encoding="utf-8")
    began = time.monotonic()
    with (project / f"{name}.out").open("w+", encoding="utf-8") as out:
        process = subprocess.Popen(
            train_command(source, directory), stdout=out, stderr=out, start_new_session=True, env=environment
        )
        try:
            code: int | None = process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            code = None
        out.seek(0)
        text = out.read()
    for log in sorted((directory / "logs").glob("*.jsonl")):
        text += "".join(line for line in log.read_text(encoding="utf-8").splitlines(True) if "in pieces" in line)
    steps = len(read_metrics(directory / "metrics.jsonl", process="trainer")) if directory.exists() else 0
    return Seen(seconds=time.monotonic() - began, steps=steps, code=code, text=text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--model", default="135m", choices=list(MODELS))
    parser.add_argument("--tiny", action="store_true", help="on a CPU, with planted errors; the seconds mean nothing")
    args = parser.parse_args()
    model = "tiny" if args.tiny else args.model
    figures = []
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(1 if args.tiny else AT_ONCE) as pool:
        project = prepare(model, MODELS[model], Path(folder))
        running = {name: pool.submit(provoke, name, project, is_tiny=args.tiny) for name in args.cases}
        for name, future in running.items():
            case, seen = CASES[name], future.result()
            end = "did not end" if seen.code is None else "went on" if seen.code == 0 else "ended"
            print_status(f"\n{name}: {case.what}: {end} after {seen.seconds:.0f} s, {seen.steps} steps")
            for line in [*seen.noticed, *seen.ending]:
                print_status(f"    {line}")
            figures.append(
                Figure(
                    name=f"out_of_memory_{name}",
                    ours=seen.seconds,
                    peer=END_S,
                    unit="s",
                    ratio=1.0 if seen.is_good(case) else 0.0,
                    floor=1.0,
                    more={"what": case.what, "end": end, "steps": seen.steps, "shown": seen.ending[:1]},
                )
            )
    return print_figures(figures)


if __name__ == "__main__":
    sys.exit(main())
