"""The process of `rollbook eval`: one measured pass, its order on stdin as JSON, its result as one JSON line on stdout.

The policy server, the worlds and the workers are those of a run, in a directory of their own that is gone afterwards: the run that
is measured is only read.
"""

import asyncio
import json
import sys
import tempfile
from pathlib import Path

from rollbook.contracts.errors import RollbookError
from rollbook.run.commands.evaluate import EvaluationOrder
from rollbook.run.commands.measurement import Measurement, held_out_tasks, open_measuring
from rollbook.run.config.run import LoadedConfig, dump_toml, load_config
from rollbook.run.directory import RunDirectory
from rollbook.run.model_location import record_model_location
from rollbook.run.supervision.channel import Channel
from rollbook.run.supervision.child_main import RoleContext
from rollbook.telemetry.events import EventLog
from rollbook.telemetry.spans import SpanRecorder


async def evaluate(order: EvaluationOrder) -> Measurement:
    loaded = load_config(Path(order.config), order.overrides, source_dir=Path(order.source_dir))
    tasks = held_out_tasks(loaded.config, loaded.source_dir)
    with tempfile.TemporaryDirectory(prefix="rollbook-eval-") as scratch:
        context = _context(Path(scratch), loaded, Path(order.model_dir))
        try:
            async with open_measuring(context, tasks, policy_url=None) as measuring:
                publication = await measuring.publish(Path(order.model_dir), step=order.step)
                return await measuring.measure(publication=publication, step=order.step)
        finally:
            context.spans.close()
            context.log.close()


def _context(scratch: Path, loaded: LoadedConfig, model_dir: Path) -> RoleContext:
    directory = RunDirectory(scratch)
    directory.prepare()
    directory.config_file.write_text(dump_toml(loaded.config), encoding="utf-8")
    directory.write_manifest(name=loaded.config.run.name, source_dir=loaded.source_dir)
    record_model_location(directory, model_dir)
    return RoleContext(
        role="evaluation",
        directory=directory,
        loaded=loaded,
        channel=Channel(None),
        log=EventLog("evaluation", directory.log_file("evaluation")),
        spans=SpanRecorder("evaluation", directory.span_file("evaluation")),
        addresses={},
        server_socket=None,
    )


def main() -> int:
    order = EvaluationOrder(**json.load(sys.stdin))
    try:
        measured = asyncio.run(evaluate(order))
    except RollbookError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    sys.stdout.write(json.dumps(measured.row()) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
