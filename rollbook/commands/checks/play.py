"""`rollbook play`: one episode in this process, printed token by token as it is sampled. No ledger, no trainer, no workers."""

import asyncio
import dataclasses
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any

import msgspec

from rollbook.commands.arguments import Argument, Option, Overrides
from rollbook.commands.record.debug import Say, score
from rollbook.commands.record.evaluate import checkpoint_model
from rollbook.commands.servers.policy import adopt_directory_weights
from rollbook.concurrency.deadline import Deadline
from rollbook.contracts.errors import RunError
from rollbook.contracts.plugin import extend_search_path, load_on_demand
from rollbook.contracts.policy import Completion, OnTokens, SamplingParams, TokenChunk
from rollbook.contracts.ports import Environment
from rollbook.contracts.task import Observation, Task
from rollbook.contracts.trajectory import RolloutSample
from rollbook.contracts.user_errors import did_you_mean
from rollbook.envs.catalog import environment_class, open_environment_pool
from rollbook.inference.engine import Engine, open_engine
from rollbook.rollout.contract import RolloutSetup, Tokenizer
from rollbook.rollout.groups.player import checked_sample
from rollbook.run.config.run import LoadedConfig
from rollbook.run.config.source import load_source
from rollbook.run.directory import RunDirectory, model_directory
from rollbook.run.episodes import begin_episode, model_tokenizer, open_rollout
from rollbook.tasks.dataset import load_tasks
from rollbook.telemetry.events import EventLog

Write = Callable[[str], None]
"""Prints without a line break."""


class PrintingPolicy:
    """Samples with an engine in this process and prints each token as it is sampled. Satisfies `Policy`."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer, *, is_greedy: bool, write: Write) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._is_greedy = is_greedy
        self._write = write

    async def complete(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        min_publication: int = 0,
        timeout_s: float | None = None,
        on_tokens: OnTokens | None = None,
    ) -> Completion:
        if self._is_greedy:
            sampling = msgspec.structs.replace(sampling, temperature=0.0, top_p=1.0, top_k=0)
        ids: list[int] = []
        printed = ""

        def show(chunk: TokenChunk) -> None:
            nonlocal printed
            if on_tokens is not None:
                on_tokens(chunk)
            ids.extend(chunk.token_ids.tolist())
            text = self._tokenizer.decode(ids, skip_special_tokens=False)
            # A character of several tokens is complete with its last one.
            if text.startswith(printed) and not text.endswith("\N{REPLACEMENT CHARACTER}"):
                self._write(text[len(printed) :])
                printed = text

        self._write("policy  ")
        completion = await self._engine.submit(prompt_ids, sampling, on_tokens=show)
        self._write(f"    ({len(completion.token_ids)} tokens, {completion.finish_reason})\n")
        return completion


class _ShownEnvironment:
    """Prints what the environment returns. Satisfies `Environment`."""

    def __init__(self, env: Environment, say: Say) -> None:
        self._env = env
        self._say = say

    async def reset(self, task: Mapping[str, Any]) -> Observation:
        return self._shown(await self._env.reset(task))

    async def step(self, action: str) -> Observation:
        return self._shown(await self._env.step(action))

    async def close(self) -> None:
        await self._env.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._env, name)

    def _shown(self, seen: Observation) -> Observation:
        end = ", done" + ("" if seen.solved is None else ", solved" if seen.solved else ", not solved")
        self._say(f"env     {seen.text}    (reward {seen.reward:g}{end if seen.done else ''})")
        return seen


def play_episode(
    source: Path, *, overrides: Sequence[str], task: str | None, is_greedy: bool, write: Write
) -> RolloutSample | None:
    """Play one task with the model of a config file or the newest checkpoint of a run directory."""

    def say(text: str) -> None:
        write(f"{text}\n")

    with tempfile.TemporaryDirectory(prefix="rollbook-play-") as scratch:
        loaded = load_source(source, overrides)
        if source.is_dir():
            directory = RunDirectory(source.resolve())
            model_dir, step = checkpoint_model(directory, None)
            say(f"model   step {step} of {directory.path}")
        else:
            model_dir = _initial_model(loaded, Path(scratch))
        if loaded.config.tasks.is_posted:
            raise RunError('tasks.source = "atropos": external environments play the episodes of this run')
        return asyncio.run(_play(loaded, model_dir, _task(loaded, task), is_greedy=is_greedy, write=write, say=say))


def _initial_model(loaded: LoadedConfig, scratch: Path) -> Path:
    found = model_directory(loaded.config.model, loaded.source_dir)
    if found is not None:
        return found
    prepare = load_on_demand("rollbook.trainer.model.model_directory:prepare_model_directory")
    made: Path = prepare(loaded.config.model, scratch / "model", seed=loaded.config.run.seed)
    return made


def _task(loaded: LoadedConfig, name: str | None) -> Task:
    extend_search_path(loaded.search_path)
    tasks = load_tasks(loaded.config.tasks, base_dir=loaded.source_dir)
    if name is None:
        return tasks[0]
    found = next((task for task in tasks if task.id == name), None)
    if found is None:
        advice = did_you_mean(name, [task.id for task in tasks[:10_000]])
        raise RunError(
            f"there is no task {name!r} among the {len(tasks)} tasks of {loaded.config.tasks.source}{advice}"
        )
    return found


async def _play(
    loaded: LoadedConfig, model_dir: Path, task: Task, *, is_greedy: bool, write: Write, say: Say
) -> RolloutSample | None:
    config, log = loaded.config, EventLog("play")
    if config.inference.engine not in ("transformers", "scripted"):
        raise RunError(
            f"`rollbook play` samples in this process, without inference.engine = '{config.inference.engine}'; "
            "add --set inference.engine=transformers and the settings that go with it"
        )
    tokenizer = model_tokenizer(model_dir)
    async with (
        open_engine(config.inference, model_dir) as engine,
        _shown_environments(loaded, say, log) as adapt,
    ):
        await adopt_directory_weights(engine)
        policy = PrintingPolicy(engine, tokenizer, is_greedy=is_greedy, write=write)
        async with open_rollout(loaded, policy, tokenizer=tokenizer, log=log, adapt=adapt) as rollout:
            say(f"task    {task.id}")
            begin_episode("play", max_seconds=config.rollout.max_seconds)
            sample = checked_sample(await rollout(task.row_copy()))
        if sample is None:
            say("the rollout function returned None: the sample is dropped")
        else:
            await score(loaded, task.row, sample, tokenizer, say)
    return sample


@asynccontextmanager
async def _shown_environments(
    loaded: LoadedConfig, say: Say, log: EventLog
) -> AsyncIterator[Callable[[RolloutSetup], RolloutSetup]]:
    """Changes a setup so that its environments print what they return. A class with its own pool gets a pool of one."""
    env = loaded.config.env
    extend_search_path(loaded.search_path)
    has_pool = env.url is None and hasattr(environment_class(env.name), "open_pool")
    if has_pool:
        async with open_environment_pool(env, size=1, log=log) as pool:

            @asynccontextmanager
            async def pooled() -> AsyncIterator[Environment]:
                acquired = await pool.acquire(Deadline(loaded.config.rollout.open_s, "opening the environment"))
                try:
                    yield _ShownEnvironment(acquired, say)
                finally:
                    await acquired.close()

            yield lambda setup: dataclasses.replace(setup, open_environment=pooled)
        return

    def adapt(setup: RolloutSetup) -> RolloutSetup:
        @asynccontextmanager
        async def opened() -> AsyncIterator[Environment]:
            async with setup.open_environment() as inner:
                yield _ShownEnvironment(inner, say)

        return dataclasses.replace(setup, open_environment=opened)

    yield adapt


def play_command(
    config: Annotated[Path, Argument(help="The run's TOML file, or a run directory: its newest checkpoint plays.")],
    *,
    task: Annotated[str | None, Option("--task", help="The id of the task; default: the first.")] = None,
    greedy: Annotated[bool, Option("--greedy/--sampled", help="Greedy decoding, or sampling as in training.")] = False,
    override: Overrides = None,
) -> None:
    """Play one episode in this process, without a trainer, and print each token as it is sampled."""

    def write(text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    play_episode(config, overrides=override or (), task=task, is_greedy=greedy, write=write)
