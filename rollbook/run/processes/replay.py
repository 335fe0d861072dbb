"""The replay process: `python -m rollbook.run.processes.replay RUN [--until N]`. Prints one JSON line, writes nothing."""

import argparse
import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from rollbook.contracts.errors import RunError
from rollbook.run.model_location import model_location
from rollbook.run.reading import open_run
from rollbook.trainer.replay import replay


async def compare(path: Path, until: int | None) -> dict[str, Any]:
    with open_run(path) as run:
        # The last acknowledgement of a step is that of the lineage the run went on with.
        recorded = {step.step: step.digest for step in run.steps()}
        last = min(until or len(recorded), len(recorded))
        made = await replay(
            run.batches(last), model_dir=model_location(run.directory), config=run.config.trainer, until=last
        )
    diverged = [step for step in range(1, last + 1) if made.digests.get(step) != recorded[step]]
    return {
        "run_dir": str(path),
        "steps": last,
        "digest": made.final_digest,
        "recorded_digest": recorded.get(last),
        "diverged_at": diverged[0] if diverged else None,
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="rollbook replay")
    parser.add_argument("run", type=Path)
    parser.add_argument("--until", type=int)
    args = parser.parse_args()
    try:
        report = asyncio.run(compare(args.run, args.until))
    except RunError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(json.dumps(report) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
