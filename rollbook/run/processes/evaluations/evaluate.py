"""The process of `rollbook eval`: one evaluation. The request comes on stdin as JSON, the result goes to stdout as one JSON line.

Policy server, environments and workers run in a temporary run directory; the evaluated run is only read.
"""

import asyncio
import json
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from rollbook.contracts.errors import RollbookError
from rollbook.contracts.plugin import extend_search_path
from rollbook.run.config.evaluation import WARNING, EvaluationRequest
from rollbook.run.config.run import LoadedConfig, dump_toml, load_config
from rollbook.run.directory import RunDirectory
from rollbook.run.held_out import evaluated, training_tasks
from rollbook.run.processes.evaluations.measurement import Measurement, held_out_tasks, open_evaluation
from rollbook.run.supervision.channel import Channel
from rollbook.run.supervision.child_main import RoleContext
from rollbook.telemetry.events import EventLog
from rollbook.telemetry.spans import SpanRecorder


async def evaluate(request: EvaluationRequest) -> Measurement:
    search_path = [Path(path) for path in request.search_path]
    loaded = load_config(
        Path(request.config),
        request.overrides,
        source_dir=Path(request.source_dir),
        search_path=search_path,
        modules=[Path(path) for path in request.modules],
    )
    extend_search_path(loaded.search_path)
    tasks = held_out_tasks(loaded.config, loaded.source_dir)
    _warn_of_trained_tasks(loaded)
    with tempfile.TemporaryDirectory(prefix="rollbook-eval-") as scratch:
        context = _context(Path(scratch), loaded, Path(request.model_dir))
        try:
            async with open_evaluation(context, tasks, policy_url=None) as session:
                publication = await session.publish(Path(request.model_dir), step=request.step)
                return await session.measure(publication=publication, step=request.step)
        finally:
            context.spans.close()
            context.log.close()


def _warn_of_trained_tasks(loaded: LoadedConfig) -> None:
    if loaded.config.tasks.is_posted:
        return
    with suppress(RollbookError):  # the training tasks are not needed
        trained = training_tasks(loaded.config, loaded.source_dir)
        if (warning := evaluated(loaded.config, trained, loaded.source_dir).warning) is not None:
            sys.stderr.write(f"{WARNING}{warning}\n")


def _context(scratch: Path, loaded: LoadedConfig, model_dir: Path) -> RoleContext:
    directory = RunDirectory(scratch)
    directory.prepare()
    directory.config_file.write_text(dump_toml(loaded.config), encoding="utf-8")
    directory.write_manifest(name=loaded.config.run.name, source_dir=loaded.source_dir, search_path=loaded.search_path)
    directory.record_model(model_dir)
    return RoleContext(
        role="evaluation",
        name="evaluation",
        directory=directory,
        loaded=loaded,
        channel=Channel(None),
        log=EventLog("evaluation", directory.log_file("evaluation")),
        spans=SpanRecorder("evaluation", directory.span_file("evaluation")),
        addresses={},
        server_socket=None,
    )


def main() -> int:
    request = EvaluationRequest(**json.load(sys.stdin))
    try:
        measured = asyncio.run(evaluate(request))
    except RollbookError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    sys.stdout.write(json.dumps(measured.row()) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
