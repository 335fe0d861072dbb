"""Out of memory, provoked in each process of a run on a GPU: what the user saw, after how many seconds, and how the run went on.

    python -m benchmarks.loop.out_of_memory                    all cases, four at a time, on one GPU; under 3 minutes
    python -m benchmarks.loop.out_of_memory --cases optimizer publication
    python -m benchmarks.loop.out_of_memory --model cpu --cases passes     the same script without a GPU, where nothing is provoked

The run is that of `benchmarks.loop.defaults` with 135M parameters. Each case gives one process less memory than it needs, by
settings that the memory plan does not change. Ours: seconds until the run had ended, with advice or trained.
"""

import argparse
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


CASES = {
    "plan": Provoked(what="the whole run", settings={"run": {"gpu_memory_gb": 2.0}}),
    "loading": Provoked(
        what="the policy server loads the model", settings={"inference": {"gpu_memory_gb": 0.6 * WEIGHTS_GB}}
    ),
    "cache": Provoked(
        what="the policy server allocates its cache",
        settings={"inference": {"gpu_memory_gb": 1.0, "kv_memory_mb": 3000.0}},
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
    ),
    "trainer": Provoked(what="the trainer loads the model", settings={"trainer": {"gpu_memory_gb": WEIGHTS_GB}}),
    "publication": Provoked(
        what="the trainer copies its weights for a publication",
        settings={"trainer": {"gpu_memory_gb": 3.9 * WEIGHTS_GB}, "inference": {"transfer": "cuda_ipc"}},
    ),
    "optimizer": Provoked(
        what="the trainer allocates the state of the optimizer",
        settings={"trainer": {"gpu_memory_gb": 6.0 * WEIGHTS_GB}, "inference": {"transfer": "shared_memory"}},
    ),
    "passes": Provoked(
        what="the trainer trains large passes",
        settings={
            "trainer": {"gpu_memory_gb": 8.0, "max_tokens_per_microbatch": 60_000, "gradient_checkpointing": False}
        },
        goes_on=True,
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


def provoke(name: str, project: Path) -> Seen:
    case = CASES[name]
    table = tomllib.loads((project / "run.toml").read_text(encoding="utf-8"))
    table.pop("evaluation", None)
    table["trainer"] |= {"max_steps": STEPS}
    for section, values in case.settings.items():
        table[section] = {**table.get(section, {}), **values}
    source, directory = project / f"{name}.toml", project / f"run-{name}"
    source.write_text(tomli_w.dumps(table), encoding="utf-8")
    began = time.monotonic()
    with (project / f"{name}.out").open("w+", encoding="utf-8") as out:
        process = subprocess.Popen(train_command(source, directory), stdout=out, stderr=out, start_new_session=True)
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
    args = parser.parse_args()
    figures = []
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(AT_ONCE) as pool:
        project = prepare(args.model, MODELS[args.model], Path(folder))
        running = {name: pool.submit(provoke, name, project) for name in args.cases}
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
