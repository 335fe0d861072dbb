"""Evaluates a policy on held-out tasks, with workers and, unless the run's server is shared, with a separate policy server."""

import asyncio
import dataclasses
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollbook.concurrency.sockets import listening_socket, url_of
from rollbook.contracts.errors import RunError
from rollbook.contracts.policy import Publication, PublicationId
from rollbook.contracts.task import Task
from rollbook.inference.weights.client import WeightTransferClient
from rollbook.rollout.evaluation import (
    Evaluator,
    LabelResult,
    TaskResult,
    by_label,
    open_evaluator,
    share_of_publication,
)
from rollbook.run.config.run import RunConfig
from rollbook.run.held_out import evaluation_tasks
from rollbook.run.policy_clients import policy_urls
from rollbook.run.processes.rollout_worker import worker_spec
from rollbook.run.supervision.child_main import RoleContext
from rollbook.run.supervision.host import ProcessStart
from rollbook.run.supervision.process import SupervisedProcess
from rollbook.trainer.model.policy_model import PolicyModel
from rollbook.trainer.model.weights import write_weights

READY_S = 300.0
"""Time limit for the start of a server, including the load of a large model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    step: int
    results: tuple[LabelResult, ...]
    """The result over all tasks, then by label."""
    tasks: tuple[TaskResult, ...]
    pinned_ratio: float
    """Fraction of the tasks whose tokens all came from the evaluated version."""
    seconds: float

    @property
    def overall(self) -> LabelResult:
        return self.results[0]

    def row(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "seconds": round(self.seconds, 3),
            "pinned_ratio": round(self.pinned_ratio, 4),
            "results": [result.row() for result in self.results],
            "tasks": [dataclasses.asdict(task) for task in self.tasks],
        }


def held_out_tasks(config: RunConfig, source_dir: Path) -> tuple[Task, ...]:
    """The tasks of an evaluation: all, or `max_tasks` of them spread evenly over the source."""
    tasks = evaluation_tasks(config, source_dir)
    limit = config.evaluation.max_tasks
    if len(tasks) <= limit:
        return tasks
    return tuple(tasks[number * len(tasks) // limit] for number in range(limit))


class EvaluationSession:
    """Publishes weights to the evaluation's policy server and evaluates them. Opened by `open_evaluation`."""

    def __init__(
        self, evaluator: Evaluator, tasks: Sequence[Task], weights: WeightTransferClient, scratch: Path
    ) -> None:
        self._evaluator = evaluator
        self._tasks = tasks
        self._weights = weights
        self._scratch = scratch
        self._published = 0

    async def publish(self, model_dir: Path, *, step: int) -> int:
        """Push the weights of a model directory to the evaluation's own server. Returns the publication id."""
        self._published += 1
        path = self._scratch / f"{self._published}.safetensors"
        digest = await asyncio.to_thread(_write, model_dir, path)
        publication = Publication(id=PublicationId(self._published), epoch=1, step=step, digest=digest)
        await self._weights.receive(publication, str(path))
        path.unlink(missing_ok=True)
        return publication.id

    async def measure(self, *, publication: int, step: int) -> Measurement:
        began = time.perf_counter()
        played = await self._evaluator.measure(self._tasks, min_publication=publication)
        return Measurement(
            step=step,
            results=tuple(by_label(played)),
            tasks=tuple(map(TaskResult.of, played)),
            pinned_ratio=share_of_publication(played, publication),
            seconds=time.perf_counter() - began,
        )


@asynccontextmanager
async def open_evaluation(
    context: RoleContext, tasks: Sequence[Task], *, policy_url: str | None
) -> AsyncIterator[EvaluationSession]:
    """Start everything an evaluation needs; without `policy_url`, a policy server too.

    Pooled environments get a separate pool, so that training keeps all of its environments.
    """
    config = context.loaded.config
    async with AsyncExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rollbook-evaluation-")))
        addresses, token = dict(context.addresses), None
        if config.env.pool_size is not None:
            addresses["env"] = await stack.enter_async_context(_served(context, "env"))
        if policy_url is None:
            policy_url, token = await stack.enter_async_context(_served(context, "policy")), context.token
        addresses["policy"] = policy_url
        weights = await stack.enter_async_context(
            WeightTransferClient(
                policy_urls(addresses["policy"]),
                request_s=config.inference.request_s,
                api_key=token,
                log=context.log,
            )
        )
        evaluator = await stack.enter_async_context(_workers(dataclasses.replace(context, addresses=addresses)))
        yield EvaluationSession(evaluator, tasks, weights, scratch)


@asynccontextmanager
async def _workers(context: RoleContext) -> AsyncIterator[Evaluator]:
    config, settings = context.loaded.config, context.loaded.config.evaluation
    rollout = config.rollout.model_copy(
        update={
            "workers": settings.workers,
            "groups_per_worker": -(-settings.concurrency // settings.workers),
            "completions_per_prompt": settings.episodes,
            "min_samples": 1,
            # An evaluation counts every episode, not those that finish first.
            "oversample": 0,
            "drop_constant_reward": False,
            "filter": None,
            "teacher": (),
        }
    )
    spec = worker_spec(context)
    spec = dataclasses.replace(
        spec,
        config=rollout,
        settings={
            **spec.settings,
            "is_greedy": settings.greedy,
            "log_file": str(context.directory.log_file("evaluation-worker")),
        },
    )
    async with open_evaluator(
        spec, concurrency=settings.concurrency, label_field=settings.label_field, log=context.log
    ) as evaluator:
        yield evaluator


@asynccontextmanager
async def _served(context: RoleContext, role: str) -> AsyncIterator[str]:
    """A server process of the evaluation. It is not restarted: an evaluation that loses its policy fails."""
    config = context.loaded.config
    sock = listening_socket("127.0.0.1", 0)
    process = SupervisedProcess(
        ProcessStart(
            name=f"evaluation-{role}",
            role=role,
            directory=context.directory,
            listening=sock,
            environment={"OMP_NUM_THREADS": str(config.inference.threads), "TOKENIZERS_PARALLELISM": "false"},
        )
    )
    living = asyncio.create_task(process.run(), name=f"evaluation.{role}")
    try:
        ready = asyncio.create_task(process.ready.wait(), name=f"evaluation.{role}.ready")
        await asyncio.wait({living, ready}, timeout=READY_S, return_when=asyncio.FIRST_COMPLETED)
        ready.cancel()
        if not process.ready.is_set():
            raise RunError(f"the evaluation's {role} server did not start: {process.fault or process.last_output()}")
        yield url_of(sock)
    finally:
        await process.stop()
        living.cancel()
        sock.close()


def _write(model_dir: Path, path: Path) -> str:
    model = PolicyModel.load(model_dir)
    digest = model.digest()
    write_weights(model.weights(), path, digest=digest, is_durable=False)
    return digest
