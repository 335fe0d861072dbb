"""`rollbook debug` on a run directory with a recorded failure: no model, no trainer."""

from pathlib import Path

import numpy as np
import pytest

from rollbook.commands.record.debug import RecordingOverError, debug_run, root_cause
from rollbook.concurrency.clock import ManualClock
from rollbook.contracts.errors import EpisodeError, RunError
from rollbook.contracts.group import GroupId, PromptGroup
from rollbook.contracts.group_codec import encode_group
from rollbook.contracts.policy import Completion, FinishReason, SamplingParams
from rollbook.contracts.task import TaskId
from rollbook.rollout.assemblers.tokens import TrajectoryAssembler
from rollbook.rollout.groups.player import GroupOrder
from rollbook.rollout.groups.results import PlayedPart
from rollbook.rollout.workers.episode_records import (
    MAX_FAILURES,
    TRANSCRIPT_EVERY_S,
    FailedEpisodes,
    TranscriptLog,
)
from rollbook.run.config.run import dump_toml, load_config
from rollbook.run.directory import RunDirectory
from rollbook.telemetry.events import EventLog, read_json_lines
from rollbook.trainer.model.built_tokenizer import fast_tokenizer
from rollbook.trainer.model_config import ModelBuildConfig

CONFIG = """
[model.build]
vocabulary = ["heads", "tails"]
chat_template = "{% for m in messages %}{{ m.content }} {% endfor %}"
[tasks]
source = "coin_game:tasks"
[env]
name = "coin_game:Coin"
[rollout.rewards.functions.right]
path = "coin_game:right"
[trainer]
max_steps = 1
"""

CODE = """
from rollbook.contracts.task import Observation


def tasks():
    return [{"id": "one", "side": "heads"}]


class Coin:
    is_quick = True

    def reset(self, task):
        self.side = task["side"]
        return Observation(text="heads")

    def step(self, action):
        if action == "tails":
            raise ValueError("the coin fell off the table")
        return Observation(text="", reward=1.0, done=True)

    def close(self):
        pass


def right(case):
    return float(case.response == case.row["side"])
"""


def answer(*token_ids: int) -> Completion:
    return Completion(
        token_ids=np.array(token_ids, dtype=np.int32),
        logprobs=np.full(len(token_ids), -0.5, dtype=np.float32),
        versions=np.ones(len(token_ids), dtype=np.int32),
        finish_reason=FinishReason.LENGTH,
    )


def order(group: str) -> GroupOrder:
    return GroupOrder(
        group_id=GroupId(group),
        attempt=1,
        task_id=TaskId("one"),
        draw=0,
        row={"id": "one", "side": "heads"},
        min_publication=1,
        deadline_s=1.0,
    )


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    (tmp_path / "run.toml").write_text(CONFIG)
    (tmp_path / "coin_game.py").write_text(CODE)
    directory = RunDirectory(tmp_path / "run")
    directory.prepare()
    loaded = load_config(tmp_path / "run.toml")
    directory.config_file.write_text(dump_toml(loaded.config))
    directory.write_manifest(name="run", source_dir=tmp_path, search_path=[tmp_path])
    build = loaded.config.model.build
    assert isinstance(build, ModelBuildConfig)
    directory.model.mkdir()
    fast_tokenizer(build).save(str(directory.model / "tokenizer.json"))
    (directory.model / "chat_template.jinja").write_text(build.chat_template or "")
    directory.record_model(directory.model)
    return directory


def test_the_first_failed_episode_fails_again_with_the_users_exception(run: RunDirectory) -> None:
    failures = FailedEpisodes(run.failures)
    failures.add(order("one@0"), "env raised ValueError", [answer(5)])
    failures.add(order("one@1"), "another", [answer(4)])
    said: list[str] = []
    with pytest.raises(EpisodeError) as caught:
        debug_run(run.path, group=None, sample=0, say=said.append)
    cause = root_cause(caught.value)
    assert isinstance(cause, ValueError)
    assert str(cause) == "the coin fell off the table"
    assert said[0].startswith("group one@0")
    assert "policy  'tails' (1 tokens, as recorded)" in said


def test_an_episode_that_no_longer_fails_is_scored_in_this_process(run: RunDirectory) -> None:
    FailedEpisodes(run.failures).add(order("one@1"), "was repaired", [answer(4)])
    said: list[str] = []
    sample = debug_run(run.path, group="one@1", sample=0, say=said.append)
    assert sample is not None
    assert sample.reward == 1.0
    assert said[-1] == "reward  right = 1.0"


def test_a_recording_that_is_too_short_says_that_the_failure_did_not_occur(run: RunDirectory) -> None:
    FailedEpisodes(run.failures).add(order("one@0"), "reset failed", [])
    with pytest.raises(RecordingOverError, match="did not occur"):
        debug_run(run.path, group=None, sample=0, say=lambda text: None)


def test_a_run_without_failures_asks_for_a_group(run: RunDirectory) -> None:
    with pytest.raises(RunError, match="no failed episode; name a group"):
        debug_run(run.path, group=None, sample=0, say=lambda text: None)


def test_only_the_first_failures_are_recorded_one_for_each_group(run: RunDirectory) -> None:
    failures = FailedEpisodes(run.failures)
    for number in range(3 * MAX_FAILURES):
        failures.add(order(f"one@{number // 2}"), "x", [])
    assert len(list(run.failures.iterdir())) == MAX_FAILURES


def test_a_transcript_is_logged_at_most_once_a_minute(tmp_path: Path) -> None:
    assembler = TrajectoryAssembler(SamplingParams(max_tokens=1))
    assembler.add_prompt([1])
    assembler.add_completion(answer(5))
    sample = assembler.build(reward=0.5)
    group = PromptGroup(id=GroupId("one@0"), task_id=TaskId("one"), draw=0, samples=(sample, sample))
    clock, log = ManualClock(), EventLog("worker", tmp_path / "worker.jsonl")
    transcripts = TranscriptLog(log, decode=lambda ids: " ".join(map(str, ids)), clock=clock)
    played = [PlayedPart(order_id=GroupId(f"one@{n}"), encoded=encode_group(group)) for n in range(3)]
    transcripts.add(played[0])
    transcripts.add(played[1])
    clock.jump(TRANSCRIPT_EVERY_S)
    transcripts.add(played[2])
    log.close()
    events = read_json_lines(tmp_path / "worker.jsonl")
    assert [(event["group_id"], event["reward"]) for event in events] == [("one@0", 0.5), ("one@2", 0.5)]
    assert events[0]["messages"] == [{"role": "tokens", "content": "1 5"}]
