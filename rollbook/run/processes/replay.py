"""The replay process: `python -m rollbook.run.processes.replay RUN [--until N]`. Prints one JSON line.

Verifying writes nothing. Another loss leaves its curves and a picture in the folder that it is told.
"""

import argparse
import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from rollbook.contracts.errors import RunError
from rollbook.contracts.plugin import extend_search_path
from rollbook.dashboard.plots import draw_comparison
from rollbook.run.commands.counterfactual import MEASURES, curves, other_recipe, table_of
from rollbook.run.directory import RunDirectory, write_json
from rollbook.run.model_location import model_location
from rollbook.run.record import open_run
from rollbook.trainer.replay import replay, retrain


async def compare(path: Path, until: int | None) -> dict[str, Any]:
    with open_run(path) as run:
        # The last acknowledgement of a step is that of the lineage the run went on with.
        recorded = {step.step: step.digest for step in run.steps()}
        last = min(until or len(recorded), len(recorded))
        made = await replay(
            run.batches(last),
            model_dir=model_location(run.directory),
            config=run.config.trainer,
            until=last,
            publishes_adapters=run.config.inference.publish == "adapter",
        )
    diverged = [step for step in range(1, last + 1) if made.digests.get(step) != recorded[step]]
    return {
        "run_dir": str(path),
        "steps": last,
        "digest": made.final_digest,
        "recorded_digest": recorded.get(last),
        "diverged_at": diverged[0] if diverged else None,
    }


async def contrast(
    path: Path, until: int | None, *, loss: str | None, overrides: list[str], out: Path
) -> dict[str, Any]:
    """Train the recorded stream twice, as it was trained and with another recipe, and put both side by side."""
    with open_run(path) as run:
        recorded = run.config.trainer
        other = other_recipe(recorded, loss, overrides)
        last = min(until or len(run.steps()), len(run.steps()))
        model_dir = model_location(run.directory)
        names = (f"{recorded.loss}, as recorded", f"{other.loss}, replayed")
        both: dict[str, dict[str, list[float | None]]] = {}
        digests = {}
        for name, config in zip(names, (recorded, other), strict=True):
            steps, digest = await retrain(run.batches(last), model_dir=model_dir, config=config, judged_by=recorded)
            both[name], digests[name] = curves(steps), digest
    panels = {told: {name: lines[key] for name, lines in both.items()} for key, told in MEASURES.items()}
    picture = draw_comparison(out / "curves.png", f"{run.run_id}: {last} recorded steps", panels)
    changed = {
        key: [value, other.numeric_settings().get(key)]
        for key, value in recorded.numeric_settings().items()
        if other.numeric_settings().get(key) != value
    }
    report = {
        "run_dir": str(path),
        "steps": last,
        "changed": changed,
        "digests": digests,
        "table": table_of(both),
        "picture": str(picture),
        "curves": str(out / "curves.json"),
    }
    write_json(out / "curves.json", {**report, "lines": both})
    return report


def main() -> int:
    parser = argparse.ArgumentParser(prog="rollbook replay")
    parser.add_argument("run", type=Path)
    parser.add_argument("--until", type=int)
    parser.add_argument("--loss")
    parser.add_argument("--set", dest="overrides", action="append", default=[])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    try:
        extend_search_path([RunDirectory(args.run.resolve()).read_manifest()["source_dir"]])
        if args.out is None:
            report = asyncio.run(compare(args.run, args.until))
        else:
            report = asyncio.run(contrast(args.run, args.until, loss=args.loss, overrides=args.overrides, out=args.out))
    except RunError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(json.dumps(report) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
