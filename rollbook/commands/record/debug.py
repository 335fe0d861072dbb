"""`rollbook debug RUN [GROUP]`: plays a recorded episode again in this process, where a debugger works.

The policy's answers are the recorded ones, so neither a model nor a trainer is needed. The environment, the rollout function and
the reward functions run as in a worker, but without time limits.
"""

import asyncio
import dataclasses
import json
import pdb
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from rollbook.commands.arguments import Argument, Option
from rollbook.commands.output import EXIT_FAILED, result, stderr_console
from rollbook.contracts.errors import EpisodeError, RollbookError, RunError
from rollbook.contracts.group import GroupId
from rollbook.contracts.plugin import extend_search_path
from rollbook.contracts.policy import Completion, FinishReason, OnTokens, SamplingParams
from rollbook.contracts.trajectory import RolloutSample
from rollbook.rollout.contract import Tokenizer
from rollbook.rollout.groups.player import checked_sample
from rollbook.rollout.rewards.main import checked_turns
from rollbook.rollout.rewards.scorer import TO_BE_SCORED, case_of
from rollbook.run.config.run import LoadedConfig, load_resolved_config
from rollbook.run.directory import RunDirectory
from rollbook.run.episodes import begin_episode, call_reward, model_tokenizer, open_rollout
from rollbook.run.reader import RecordedRun, open_run
from rollbook.tasks.dataset import load_tasks
from rollbook.telemetry.events import EventLog

NO_LIMIT_S = 7 * 86_400.0
"""A person who steps through code takes as long as needed."""

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedEpisode:
    group_id: str
    row: Mapping[str, Any]
    completions: tuple[Completion, ...]
    cause: str | None
    """Why it failed; None for an episode that was stored as a sample."""


class RecordingOverError(EpisodeError):
    """The episode needs more answers of the policy than were recorded."""


class RecordedPolicy:
    """Gives the recorded answers in order. Satisfies `Policy`."""

    def __init__(self, completions: Sequence[Completion], *, on_answer: Callable[[Completion], None]) -> None:
        self._left = list(completions)
        self._on_answer = on_answer

    async def complete(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        min_publication: int = 0,
        timeout_s: float | None = None,
        on_tokens: OnTokens | None = None,
    ) -> Completion:
        if not self._left:
            raise RecordingOverError("the recorded answers of the policy end here; the recorded failure did not occur")
        self._on_answer(self._left[0])
        return self._left.pop(0)


def debug_run(path: Path, *, group: str | None, sample: int, say: Say) -> RolloutSample | None:
    """Play the first failed episode, that of a group, or a stored sample again. Exceptions of user code are not caught."""
    directory = RunDirectory(path.resolve())
    loaded = load_resolved_config(directory)
    episode = find_episode(loaded, directory, group=group, sample=sample)
    say(f"group {episode.group_id}, task {json.dumps(dict(episode.row), ensure_ascii=False)[:200]}")
    if episode.cause is not None:
        say(f"recorded failure: {episode.cause}")
    tokenizer = model_tokenizer(directory.initial_model)
    return asyncio.run(_play(loaded, episode, tokenizer, say))


def find_episode(loaded: LoadedConfig, directory: RunDirectory, *, group: str | None, sample: int) -> RecordedEpisode:
    """The first failed episode of the run or of the group; else a stored sample of the group."""
    for file in sorted(directory.failures.glob("*.json")):
        with suppress(OSError, ValueError, KeyError):  # a file may be cut off by a kill
            record = json.loads(file.read_text(encoding="utf-8"))
            if group in (None, record["group_id"]):
                return _failed(record)
    if group is None:
        raise RunError(
            f"{directory.path} has no failed episode; name a group to play one of its samples again "
            "(`rollbook inspect RUN --groups` lists them)"
        )
    with open_run(directory.path) as run:
        return _stored(run, loaded, GroupId(group), sample)


def _failed(record: Mapping[str, Any]) -> RecordedEpisode:
    completions = tuple(
        Completion(
            token_ids=np.array(answer["token_ids"], dtype=np.int32),
            logprobs=np.array(answer["logprobs"], dtype=np.float32),
            versions=np.array(answer["versions"], dtype=np.int32),
            finish_reason=FinishReason(answer["finish_reason"]),
        )
        for answer in record["completions"]
    )
    return RecordedEpisode(
        group_id=record["group_id"], row=record["row"], completions=completions, cause=record["cause"]
    )


def _stored(run: RecordedRun, loaded: LoadedConfig, group_id: GroupId, number: int) -> RecordedEpisode:
    task_id, group = run.explain(group_id).group.task_id, run.samples(group_id)
    if group is None:
        raise RunError(
            f"group {group_id} has no stored samples: its payload was deleted (ledger.keep_payloads), or it has none"
        )
    if number >= len(group.samples):
        raise RunError(f"group {group_id} has {len(group.samples)} samples; --sample must be below that")
    sample = group.samples[number]
    extend_search_path(loaded.search_path)
    tasks = load_tasks(loaded.config.tasks, base_dir=loaded.source_dir)
    row = next((task.row for task in tasks if task.id == task_id), None)
    if row is None:
        raise RunError(f"the tasks no longer contain {task_id!r}, the task of group {group_id}")
    completions = []
    for turn in sample.turns:
        sequence, part = sample.sequences[turn.sequence], slice(turn.start, turn.end)
        completions.append(
            Completion(
                token_ids=sequence.token_ids[part],
                logprobs=sequence.logprobs[part],
                versions=sequence.versions[part],
                finish_reason=FinishReason.STOP,
            )
        )
    return RecordedEpisode(group_id=group_id, row=row, completions=tuple(completions), cause=sample.invalid_cause)


async def _play(loaded: LoadedConfig, episode: RecordedEpisode, tokenizer: Tokenizer, say: Say) -> RolloutSample | None:
    def show(answer: Completion) -> None:
        say(f"policy  {tokenizer.decode(answer.token_ids.tolist())!r} ({len(answer.token_ids)} tokens, as recorded)")

    unlimited = dict.fromkeys(("step_s", "open_s", "max_seconds"), NO_LIMIT_S)
    config = loaded.config.model_copy(update={"rollout": loaded.config.rollout.model_copy(update=unlimited)})
    patient = dataclasses.replace(loaded, config=config)
    policy = RecordedPolicy(episode.completions, on_answer=show)
    async with open_rollout(patient, policy, tokenizer=tokenizer, log=EventLog("debug")) as rollout:
        begin_episode(episode.group_id, max_seconds=NO_LIMIT_S)
        sample = checked_sample(await rollout(dict(episode.row)))
    if sample is None:
        say("the rollout function returned None: the sample is dropped")
        return None
    await score(loaded, episode.row, sample, tokenizer, say)
    return sample


async def score(
    loaded: LoadedConfig, row: Mapping[str, Any], sample: RolloutSample, tokenizer: Tokenizer, say: Say
) -> None:
    """Call the run's reward functions in this process and show their values."""
    say(f"episode reward {sample.reward}, {len(sample.turns)} turns, {sample.num_trained} trained tokens")
    if sample.invalid_cause not in (None, TO_BE_SCORED):
        say(f"unscorable: {sample.invalid_cause}")
        return
    case = case_of(row, sample, decode=tokenizer.decode)
    for name, function in loaded.config.rollout.rewards.functions.items():
        if function.path is None:
            say(f"reward  {name}: its judges are not asked here")
            continue
        if function.sees_group:
            say(f"reward  {name}: it compares the samples of a group, and this is one of them")
            continue
        value = await call_reward(name, function.path, case)
        _, fault, _ = checked_turns(value, case)
        say(f"reward  {name} = {value!r}" + (f": {fault}" if fault else ""))


def root_cause(error: BaseException) -> BaseException:
    """The exception of user code inside the errors that wrap it."""
    while isinstance(error, RollbookError) and error.__cause__ is not None:
        error = error.__cause__
    return error


def debug_command(
    run: Annotated[Path, Argument(help="The run directory.")],
    group: Annotated[
        str | None, Argument(help="A group id; default: the first episode of the run that failed.")
    ] = None,
    *,
    sample: Annotated[int, Option("--sample", min=0, help="Of a group without a failed episode.")] = 0,
    use_pdb: Annotated[bool, Option("--pdb", help="Enter the debugger where the exception was raised.")] = False,
) -> int:
    """Play a recorded episode again with the policy's recorded answers, in this process: `breakpoint()` in your code works.

    The exit code is 1 if your code raised, 0 otherwise.
    """
    try:
        debug_run(run, group=group, sample=sample, say=result)
    except RecordingOverError as error:
        stderr_console().print(str(error), style="green", markup=False)
    except Exception as error:
        cause = root_cause(error)
        if isinstance(cause, RollbookError):
            raise  # no exception of user code: the message says everything
        traceback.print_exception(cause)
        if use_pdb:
            pdb.post_mortem(cause.__traceback__)
        return EXIT_FAILED
    return 0
