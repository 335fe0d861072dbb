"""The process of the pre-flight: runs the user's code once, and reports every fault.

It loads the tasks, inspects the model's files, plays one episode with a canned answer instead of a policy, and scores it. The
config comes on stdin as a pickle; the findings go to stdout as JSON lines. User code may hang, exit or print here: no other
process depends on this one. It imports no torch.
"""

import asyncio
import dataclasses
import io
import json
import os
import pickle
import re
import sys
import traceback
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, TextIO

import aiohttp
import numpy as np

from rollbook.contracts.errors import EpisodeError, RunError, TransientError
from rollbook.contracts.group import GroupId, PromptGroup
from rollbook.contracts.plugin import extend_search_path
from rollbook.contracts.policy import Completion, FinishReason, OnTokens, SamplingParams
from rollbook.contracts.ports import Environment
from rollbook.contracts.task import Observation, Task, TaskId
from rollbook.contracts.trajectory import RolloutSample
from rollbook.contracts.user_errors import describe_error, is_user_file
from rollbook.envs.catalog import environment_class
from rollbook.envs.config import EnvConfig
from rollbook.ledger.client.client import open_ledger_client
from rollbook.ledger.stores.registry import store_warnings
from rollbook.rollout.agents.program import AgentError
from rollbook.rollout.config import RolloutConfig
from rollbook.rollout.contract import RenderError, RolloutSetup, Tokenizer, load_rollout
from rollbook.rollout.episodes.env_calls import EnvironmentTimeoutError
from rollbook.rollout.groups.filters import load_own_filter
from rollbook.rollout.groups.player import checked_sample
from rollbook.rollout.policy import EpisodeTimeUpError, PromptTooLongError
from rollbook.rollout.rewards.judges import connect_failure
from rollbook.rollout.rewards.main import checked_turns, checked_values
from rollbook.rollout.rewards.messages import RewardCase
from rollbook.rollout.rewards.scorer import TO_BE_SCORED, case_of
from rollbook.run.config.run import LoadedConfig, RunConfig
from rollbook.run.episodes import begin_episode, call_reward, open_rollout
from rollbook.run.held_out import held_out, training_tasks
from rollbook.run.ledger_clients import external_token
from rollbook.run.preflight.model_files import context_length, model_faults, tokenizer_of
from rollbook.sandbox.harbor.task import read_task
from rollbook.tasks.dataset import build_source
from rollbook.telemetry.events import EventLog

CANNED_ANSWER = "42"
MAX_TURNS = 4
"""Turns of the episode. Enough to see a reset, steps and a chat template that rewrites earlier turns."""
CONNECT_S = 5.0
"""For the servers of judges and teachers."""
MAX_REQUESTS = 32
"""Requests to the canned policy. A rollout function that ignores the turn limit is stopped here, without a fault."""
LEDGER_S = 5.0
"""Time limit of a request to an external ledger."""


class FindingsWriter:
    """Writes the findings, one JSON line each."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._seen: set[tuple[str, str]] = set()

    def doing(self, path: str, what: str) -> None:
        """What begins now; it is named if this process hangs or dies."""
        self._write({"doing": [path, what]})

    def fault(self, path: str, message: str) -> None:
        self._add("fault", path, message)

    def warning(self, path: str, message: str) -> None:
        self._add("warning", path, message)

    def done(self) -> None:
        self._write({"done": True})

    @contextmanager
    def checking(self, path: str, what: str) -> Iterator[None]:
        """Turn an error in the block into a fault of this setting."""
        self.doing(path, what)
        try:
            yield
        except RunError as error:
            self.fault(path, str(error).removeprefix(f"{path} = "))
        except Exception as error:
            self.fault(path, describe_error(error))

    def _add(self, kind: str, path: str, message: str) -> None:
        if (path, message) not in self._seen:
            self._seen.add((path, message))
            self._write({kind: [path, message]})

    def _write(self, row: Mapping[str, Any]) -> None:
        self._out.write(json.dumps(row) + "\n")
        self._out.flush()


class CannedPolicy:
    """Gives the same short answer to every request. Satisfies `Policy`."""

    def __init__(self, tokenizer: Tokenizer, *, config: RunConfig, context: int | None) -> None:
        self._answer = _answer_ids(tokenizer)
        self._end = tokenizer.eos_token_ids[:1]
        limits = {"rollout.max_total_tokens": config.rollout.max_total_tokens, "the model's context": context}
        if config.inference.max_model_len is not None:
            limits["inference.max_model_len"] = config.inference.max_model_len
        self._limits = {name: limit for name, limit in limits.items() if limit is not None}
        self._requests = 0

    async def complete(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        min_publication: int = 0,
        timeout_s: float | None = None,
        on_tokens: OnTokens | None = None,
    ) -> Completion:
        self._requests += 1
        for name, limit in self._limits.items():
            if self._requests == 1 and len(prompt_ids) >= limit:
                raise PromptTooLongError(
                    f"the first prompt has {len(prompt_ids)} tokens, and {name} = {limit} leaves none to sample"
                )
        if self._requests > MAX_REQUESTS:
            raise EpisodeTimeUpError("the pre-flight plays no more turns")
        ids = [*self._answer, *self._end][: sampling.max_tokens]
        is_ended = ids[-1:] == list(self._end)
        return Completion(
            token_ids=np.array(ids, dtype=np.int32),
            logprobs=np.full(len(ids), -1.0, dtype=np.float32),
            versions=np.zeros(len(ids), dtype=np.int32),
            finish_reason=FinishReason.STOP if is_ended else FinishReason.LENGTH,
            generation_s=0.0,
        )


def _answer_ids(tokenizer: Tokenizer) -> list[int]:
    """The tokens of the canned answer, or, if the vocabulary has no digits, of the first word that it has."""
    ids = tokenizer.encode(CANNED_ANSWER)
    if tokenizer.decode(ids).strip():
        return ids
    return next(([number] for number in range(tokenizer.vocab_size) if tokenizer.decode([number]).strip()), ids or [0])


class _WatchedEnvironment:
    """An environment that records its failure, so that a fault names the environment and not the rollout function."""

    def __init__(self, env: Environment, watch: "EnvironmentWatch") -> None:
        self._env = env
        self._watch = watch

    async def reset(self, task: Mapping[str, Any]) -> Observation:
        with self._watch.call("resetting the environment"):
            return await self._env.reset(task)

    async def step(self, action: str) -> Observation:
        with self._watch.call(f"a step of the environment with {action!r}"):
            return await self._env.step(action)

    async def close(self) -> None:
        await self._env.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._env, name)


class NotCheckedError(EpisodeError):
    """The rollout function needs something that the pre-flight does not start."""


class EnvironmentWatch:
    def __init__(self, config: EnvConfig, findings: FindingsWriter) -> None:
        self._config = config
        self._findings = findings
        self.path = "env.name" if config.url is None else "env.url"
        self.failure: BaseException | None = None

    def adapt(self, setup: RolloutSetup) -> RolloutSetup:
        limits = dataclasses.replace(setup.limits, max_turns=min(setup.limits.max_turns, MAX_TURNS))
        is_pooled = self._config.url is None and hasattr(environment_class(self._config.name), "open_pool")

        @asynccontextmanager
        async def opened() -> AsyncIterator[Environment]:
            if is_pooled:
                raise NotCheckedError(
                    f"{self._config.name} opens its own pool, which a pre-flight does not start: it was not reset"
                )
            with self.call("opening an environment"):
                env = setup.open_environment()
                inner = await env.__aenter__()
            try:
                yield _WatchedEnvironment(inner, self)
            finally:
                await env.__aexit__(None, None, None)

        return dataclasses.replace(setup, open_environment=opened, limits=limits)

    @contextmanager
    def call(self, what: str) -> Iterator[None]:
        self._findings.doing(self.path, what)
        try:
            yield
        except Exception as error:
            self.failure = error
            raise


class Checks:
    def __init__(self, loaded: LoadedConfig, findings: FindingsWriter) -> None:
        self._loaded = loaded
        self._config = loaded.config
        self._findings = findings
        self._log = EventLog("preflight", echo=io.StringIO())

    async def run(self) -> None:
        extend_search_path(self._loaded.search_path)
        await self._ledger()
        tokenizer = self._model()
        if self._config.tasks.is_posted:
            return
        task = self._tasks()
        sample = None
        silent = await self._silent_servers()
        if task is not None and tokenizer is not None and "env.url" not in silent:
            sample = await self._episode(task, tokenizer)
        else:
            with self._findings.checking("rollout.function", "loading the rollout function"):
                load_rollout(self._config.rollout.function)
        if task is not None:
            await self._rewards(task, sample, tokenizer)
        self._filter(sample)

    async def _ledger(self) -> None:
        ledger = self._config.ledger
        if ledger.store is not None:
            with self._findings.checking("ledger.store", "connecting to the store"):
                for warning in await asyncio.to_thread(store_warnings, ledger.store.get_secret_value()):
                    self._findings.warning("ledger.store", warning)
        if ledger.url is not None:
            with self._findings.checking("ledger.url", "connecting to the ledger"):
                token = external_token(self._loaded)
                async with open_ledger_client(
                    ledger.url, self._config.run.name, request_s=LEDGER_S, token=token
                ) as client:
                    await client.runs()

    def _model(self) -> Tokenizer | None:
        path = "model.path" if self._config.model.build is None else "model.build"
        faults: list[str] = []
        with self._findings.checking(path, "inspecting the model"):
            faults = list(model_faults(self._config.model, self._loaded.source_dir))
        for fault in faults:
            self._findings.fault(path, fault)
        if faults:
            return None
        tokenizer = None
        with self._findings.checking(path, "loading the tokenizer"):
            tokenizer = tokenizer_of(self._config.model, self._loaded.source_dir)
            if tokenizer is not None and not tokenizer.eos_token_ids:
                self._findings.warning(
                    path, "the tokenizer has no end token, so every turn has rollout.sampling.max_tokens tokens"
                )
            elif tokenizer is not None and (end := _unknown_end_of_turn(tokenizer)) is not None:
                known = ", ".join(tokenizer.decode([id_], skip_special_tokens=False) for id_ in tokenizer.eos_token_ids)
                self._findings.warning(
                    path,
                    f"the chat template ends a turn of the assistant with {end!r}, but generation ends at {known}: the policy"
                    " would continue after its turn. Correct eos_token in tokenizer_config.json, or eos_token_id in"
                    " generation_config.json",
                )
        return tokenizer

    def _tasks(self) -> Task | None:
        tasks: tuple[Task, ...] = ()
        with self._findings.checking("tasks.source", "loading the tasks"):
            tasks = training_tasks(self._config, self._loaded.source_dir)
            build_source(self._config.tasks, tasks)
            if self._config.env.name == "harbor":
                for path, warning in times_below_tests(self._config.rollout, tasks):
                    self._findings.warning(path, warning)
        evaluation = self._config.evaluation
        if tasks and evaluation.is_configured:
            path = "evaluation.source" if evaluation.source is not None else "evaluation"
            with self._findings.checking(path, "loading the held-out tasks"):
                found = held_out(self._config, tasks, self._loaded.source_dir)
                if found is not None and found.warning is not None:
                    self._findings.warning(path, found.warning)
        return tasks[0] if tasks else None

    async def _episode(self, task: Task, tokenizer: Tokenizer) -> RolloutSample | None:
        """The sample of an episode in which the policy always gives the canned answer."""
        findings, rollout = self._findings, self._config.rollout
        findings.doing("rollout.function", "loading the rollout function")
        watch = EnvironmentWatch(self._config.env, findings)
        context = context_length(self._config.model, self._loaded.source_dir)
        for path, warning in unreachable_lengths(rollout, context):
            findings.warning(path, warning)
        policy = CannedPolicy(tokenizer, config=self._config, context=context)
        try:
            opened = open_rollout(self._loaded, policy, tokenizer=tokenizer, log=self._log, adapt=watch.adapt)
            async with opened as play:
                if rollout.function == "remote":
                    return None
                findings.doing("rollout.function", f"playing an episode of task {task.id!r}")
                begin_episode("preflight", max_seconds=rollout.max_seconds)
                sample = checked_sample(await play(task.row_copy()))
        except NotCheckedError as error:
            findings.warning("env.name", str(error))
        except EpisodeTimeUpError:
            pass
        except RunError as error:
            path, message = _setting_of(str(error))
            findings.fault(path, message)
        except PromptTooLongError as error:
            findings.fault("rollout.max_total_tokens", str(error))
        except RenderError as error:
            findings.fault("model", str(error))
        except Exception as error:
            self._add_episode_error(error, watch, task)
        else:
            self._check_sample(sample, task)
            return sample
        return None

    def _add_episode_error(self, error: Exception, watch: EnvironmentWatch, task: Task) -> None:
        path = watch.path if error is watch.failure else self._played_setting(error)
        message = str(error) if isinstance(error, EpisodeError | TransientError) else f"raised {describe_error(error)}"
        # User code that raises an EpisodeError may reject the canned answer on purpose.
        raised = error.__cause__ if isinstance(error, AgentError) and error.__cause__ is not None else error
        frames = traceback.extract_tb(raised.__traceback__)
        is_deliberate = isinstance(raised, EpisodeError) and (
            is_user_file(frames[-1].filename) or isinstance(raised, EnvironmentTimeoutError)
        )
        add = self._findings.warning if is_deliberate else self._findings.fault
        where = f"in an episode of task {task.id!r} with the canned answer {CANNED_ANSWER!r}"
        add(path, f"{message}\n({where}; --no-preflight skips this check)")

    def _played_setting(self, error: Exception) -> str:
        """The setting that names the code which raised."""
        if not isinstance(error, AgentError):
            return "rollout.function"
        return "rollout.settings.agent" if "agent" in self._config.rollout.settings else "rollout.settings.command"

    def _check_sample(self, sample: RolloutSample | None, task: Task) -> None:
        if sample is None:
            self._findings.warning("rollout.function", f"returned None for task {task.id!r}: the sample is dropped")
        elif not sample.is_scorable and sample.invalid_cause != TO_BE_SCORED:
            self._findings.warning("rollout.function", f"gives an unscorable sample: {sample.invalid_cause}")
        elif not sample.is_scorable and not self._config.rollout.rewards.functions:
            self._findings.fault(
                "rollout.function", "leaves scoring to reward functions; add one under [rollout.rewards.functions.NAME]"
            )

    async def _rewards(self, task: Task, sample: RolloutSample | None, tokenizer: Tokenizer | None) -> None:
        case = RewardCase(
            row=task.row_copy(),
            messages=({"role": "user", "content": ""}, {"role": "assistant", "content": CANNED_ANSWER}),
            response=CANNED_ANSWER,
            num_sampled=1,
        )
        if sample is not None and tokenizer is not None:
            case = case_of(task.row_copy(), sample, decode=tokenizer.decode)
        for name, function in self._config.rollout.rewards.functions.items():
            if function.path is None:
                continue  # a judge costs money
            path = f"rollout.rewards.functions.{name}.path"
            with self._findings.checking(path, f"scoring the canned answer {case.response!r}"):
                if function.sees_group:
                    known = (
                        case
                        if self._config.rollout.rewards.solved_by is None
                        else dataclasses.replace(case, solved=False)
                    )
                    value = await call_reward(name, function.path, [known, known])
                    values, fault = checked_values(value, 2)
                    number = None if values is None else values[0]
                else:
                    value = await call_reward(name, function.path, case)
                    number, fault, _ = checked_turns(value, case)
                if fault is not None:
                    self._findings.fault(path, f"{fault} (for the canned answer {case.response!r})")
                elif number is None:
                    self._findings.warning(
                        path,
                        f"returned {value!r} for the canned answer {case.response!r}: such a sample has no reward and is not "
                        "trained. Does a `return` statement lack its value?",
                    )

    async def _silent_servers(self) -> set[str]:
        """Settings of judges, teachers and environments with a URL where nothing listens. No judge is asked: that costs money."""
        rollout, silent = self._config.rollout, set[str]()
        urls = [
            (f"rollout.rewards.functions.{name}.judge", judge.url)
            for name, function in rollout.rewards.functions.items()
            for judge in function.judge
        ]
        urls += [("env.url", self._config.env.url)] if self._config.env.url is not None else []
        urls += [("rollout.teacher", teacher.url) for teacher in rollout.teacher if teacher.url is not None]
        async with aiohttp.ClientSession(trust_env=True, timeout=aiohttp.ClientTimeout(total=CONNECT_S)) as session:
            for path, url in dict.fromkeys(urls):
                self._findings.doing(path, f"connecting to {url}")
                try:
                    async with session.get(url):
                        continue  # whatever it answers
                except TimeoutError:
                    reason = f"no answer within {CONNECT_S:g} s"
                except aiohttp.ClientConnectorError as error:
                    reason = connect_failure(error)
                except aiohttp.ClientError:
                    continue  # something answers
                self._findings.warning(
                    path, f"nothing answers at {url} ({reason}): start its server before the run, or correct url"
                )
                silent.add(path)
        return silent

    def _filter(self, sample: RolloutSample | None) -> None:
        if self._config.rollout.filter is None:
            return
        with self._findings.checking("rollout.filter", "calling the filter"):
            own = load_own_filter(self._config.rollout.filter)
            if sample is not None:
                own(
                    PromptGroup(
                        id=GroupId("preflight@0"), task_id=TaskId("preflight"), draw=0, samples=(sample, sample)
                    )
                )


def unreachable_lengths(rollout: RolloutConfig, context: int | None) -> Iterator[tuple[str, str]]:
    """Lengths that the user has set and that no answer can have: the setting, and what it is limited by.

    The resolved configuration of a run, with which it is resumed, names every setting: those with the default are not the user's.
    """
    total, answer = rollout.max_total_tokens, rollout.sampling.max_tokens
    least = total if context is None else min(total, context)
    owner = f"rollout.max_total_tokens = {total}" if least == total else f"the model's context of {context} tokens"
    if answer != type(rollout.sampling).model_fields["max_tokens"].default and answer > least:
        yield "rollout.sampling.max_tokens", f"is {answer}, but {owner} cuts answers before that, prompt included"
    if total != RolloutConfig.model_fields["max_total_tokens"].default and least < total:
        yield "rollout.max_total_tokens", f"is {total}, but episodes end at {owner}"


def times_below_tests(rollout: RolloutConfig, tasks: Sequence[Task]) -> Iterator[tuple[str, str]]:
    """Times that the tests of Harbor tasks may exceed, which run within a step: the setting, and the longest tests."""
    found = [read_task(Path(str(task.row["path"]))) for task in tasks if "path" in task.row]
    name, tests_s = max(
        ((task.name, task.verifier_timeout_s) for task in found), key=lambda one: one[1], default=("", 0)
    )
    why = f"the tests of {name} may take {tests_s:g} s (verifier.timeout_sec); an episode whose tests take longer is played again"
    for setting in ("step_s", "max_seconds"):
        if (limit := getattr(rollout, setting)) <= tests_s:
            yield f"rollout.{setting}", f"is {limit:g} s, and {why}"


def _setting_of(message: str) -> tuple[str, str]:
    """The setting that an error message begins with, and the rest of the message."""
    first = re.match(r"[\w.]+", message)
    path = "" if first is None else first[0].rstrip(".")
    if path.startswith(("rollout.function", "rollout.settings", "env.name", "env.args")):
        return path, message.removeprefix(path).removeprefix(":").removeprefix(" =").strip()
    return "rollout.function", message


def main() -> int:
    loaded = pickle.load(sys.stdin.buffer)
    assert isinstance(loaded, LoadedConfig)
    # User code may print: results keep the original stdout, everything else goes to stderr.
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    findings = FindingsWriter(out)
    asyncio.run(Checks(loaded, findings).run())
    findings.done()
    out.flush()
    # Threads of user code must not delay the result.
    os._exit(0)


def _unknown_end_of_turn(tokenizer: Tokenizer) -> str | None:
    """The first token after the assistant's text in the chat template, if it is a special token that does not end generation."""
    messages = [{"role": "user", "content": "What is 6 times 7?"}, {"role": "assistant", "content": CANNED_ANSWER}]
    try:
        _, found, after = tokenizer.render(messages, add_generation_prompt=False).rpartition(CANNED_ANSWER)
    except RenderError:
        return None  # rollout functions need no template
    ids = tokenizer.encode(after)
    if not found or not ids or tokenizer.decode(ids[:1]):
        return None
    return None if ids[0] in tokenizer.eos_token_ids else tokenizer.decode(ids[:1], skip_special_tokens=False)


if __name__ == "__main__":
    sys.exit(main())
