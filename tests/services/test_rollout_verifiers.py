"""Unchanged tasksets of verifiers, in their own virtual environment (`make test-verifiers`), with the tokens of the engine."""

import itertools
import json
import os
from pathlib import Path
from typing import Any

import pytest

from rollbook.contracts.errors import EpisodeError, RunError, TransientError
from rollbook.contracts.group import GroupId, GroupState
from rollbook.contracts.task import TaskId
from rollbook.contracts.trajectory import EndReason
from rollbook.rollout.config import RolloutConfig
from rollbook.rollout.groups.failures import UnscorableError
from rollbook.rollout.groups.player import GroupOrder, GroupPlayer
from rollbook.rollout.settings import EpisodeLimits
from rollbook.rollout.verifiers.process import VerifiersError, rows
from rollbook.rollout.verifiers.rollout import make_rollout
from rollbook.run.reader import open_run
from tests.parts.rollout.agents import agent_setup, assert_matches_engine
from tests.parts.run.doc_blocks import blocks_of
from tests.parts.run.small import SmallRun

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venvs" / "verifiers" / "bin" / "python"
TASKSETS = ROOT / "tests" / "parts" / "rollout" / "tasksets"
LOCAL = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}
LIMITS = EpisodeLimits(max_turns=12, max_total_tokens=8192, max_seconds=300)
"""Each episode starts processes, which takes many seconds on a busy machine."""

pytestmark = [
    pytest.mark.skipif(not PYTHON.exists(), reason="make test-verifiers installs verifiers"),
    pytest.mark.slow,
]


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tasksets can be imported, as if they were installed."""
    monkeypatch.setenv("PYTHONPATH", str(TASKSETS))


def settings(taskset: str, *, agents: tuple[str, ...] = ("agent",), **more: Any) -> dict[str, Any]:
    return {"taskset": taskset, "python": str(PYTHON), "args": dict.fromkeys(agents, LOCAL), **more}


def first_row(setting: dict[str, Any]) -> dict[str, Any]:
    return next(rows(taskset=setting["taskset"], python=setting["python"], args=setting["args"]))


def call(item: str) -> str:
    called = {"name": "stock_price", "arguments": {"item": item}}
    return f"<tool_call>\n{json.dumps(called)}\n</tool_call><|im_end|>"


def buyer(prompt: str) -> str:
    """Looks up both prices, then answers."""
    if "apples cost 3" not in prompt:
        return call("apples")
    return call("pears") if "pears cost 4" not in prompt else "7<|im_end|>"


async def test_a_taskset_of_one_turn_gives_its_weighted_rewards_and_metrics(tmp_path: Path) -> None:
    setting = settings("addition-v1")
    row = first_row(setting)
    assert row == {"id": "0", "task": {"idx": 0, "prompt": "What is 0 + 0?", "answer": 0}}
    replies = itertools.chain(["0", "12345678901", "break the reward", "end the service"], itertools.repeat("0"))
    async with agent_setup(tmp_path, lambda _: f"{next(replies)}<|im_end|>", settings=setting, limits=LIMITS) as (
        setup,
        record,
    ):
        play = make_rollout(setup)
        right = await play(row)
        assert right is not None
        assert_matches_engine(right, record)
        wrong = await play(row)
        # An error of a reward function is unscorable and not played again; an end of the service is.
        with pytest.raises(UnscorableError, match="the checker is broken"):
            await play(row)
        with pytest.raises(TransientError, match="ended with code 3"):
            await play(row)
        after = await play(row)
    assert right.reward == 1.5
    assert {name: right.metrics[name] for name in ("reward/exact_match", "reward/is_short", "num_chars")} == {
        "reward/exact_match": 1.0,
        "reward/is_short": 1.0,
        "num_chars": 1.0,
    }
    assert wrong is not None
    assert wrong.reward == 0.0
    assert after is not None
    assert after.reward == 1.5, "the service was started again"


async def test_tools_of_a_task_are_called_and_its_turns_are_one_sequence_of_exact_tokens(tmp_path: Path) -> None:
    setting = settings("stock-v1")
    async with agent_setup(tmp_path, buyer, settings=setting, limits=LIMITS) as (setup, record):
        sample = await make_rollout(setup)(first_row(setting))
    assert sample is not None
    assert sample.reward == 1.0
    assert len(sample.turns) == 3
    assert len(sample.sequences) == 1, sample.facts
    assert sample.finish_reason is EndReason.DONE
    assert_matches_engine(sample, record)
    roles = [message["role"] for message in sample.messages or ()]
    assert roles == ["user", "assistant", "tool", "assistant", "tool", "assistant"]


@pytest.mark.parametrize(
    ("limits", "end"),
    [
        (EpisodeLimits(max_turns=2, max_total_tokens=8192, max_seconds=300), EndReason.MAX_TURNS),
        (EpisodeLimits(max_turns=9, max_total_tokens=360, max_seconds=300), EndReason.MAX_TOKENS),
    ],
)
async def test_an_episode_at_a_limit_is_scored_and_truncated(
    tmp_path: Path, limits: EpisodeLimits, end: EndReason
) -> None:
    setting = settings("stock-v1")
    async with agent_setup(tmp_path, buyer, settings=setting, limits=limits) as (setup, record):
        sample = await make_rollout(setup)(first_row(setting))
    assert sample is not None
    assert sample.invalid_cause is None
    assert sample.reward == 0.0, "a result of the policy, not a failure"
    assert sample.finish_reason is end
    assert_matches_engine(sample, record)


async def test_a_failed_policy_request_is_never_scored(tmp_path: Path) -> None:
    def fails(_prompt: str) -> str:
        raise RuntimeError("the engine is broken")

    setting = settings("addition-v1")
    async with agent_setup(tmp_path, fails, settings=setting, limits=LIMITS) as (setup, _):
        with pytest.raises((TransientError, EpisodeError)):
            await make_rollout(setup)(first_row(setting))


async def test_a_harness_that_cannot_start_is_unscorable(tmp_path: Path) -> None:
    setting = settings("addition-v1")
    setting["args"]["agent"] = {**LOCAL, "harness": {"id": "null", "env": {"PATH": "/nowhere"}}}
    async with agent_setup(tmp_path, lambda _: "0<|im_end|>", settings=setting, limits=LIMITS) as (setup, _):
        with pytest.raises(EpisodeError, match="Error: "):
            await make_rollout(setup)(first_row(setting))


async def test_the_samples_of_a_group_are_one_episode_that_its_environment_compares(tmp_path: Path) -> None:
    words = itertools.cycle(["abc", "a", "abcd", "abcde"])

    def policy(prompt: str) -> str:
        return f"{next(words)}<|im_end|>" if "word of the language" in prompt else "Words are fine.<|im_end|>"

    setting = settings("shortest-v1", agents=("player", "critic"), samples_per_episode=4)
    row = first_row(setting)
    async with agent_setup(tmp_path, policy, settings=setting, limits=LIMITS) as (setup, record):
        config = RolloutConfig(completions_per_prompt=4, max_seconds=300)
        order = GroupOrder(
            group_id=GroupId("t@1"),
            attempt=1,
            task_id=TaskId("t"),
            draw=1,
            row=row,
            min_publication=0,
            deadline_s=400,
        )
        played = await GroupPlayer(make_rollout(setup), config).play(order)
        assert played.drop is None, played.drop
        group = played.group
        assert group is not None
        replies = {str((sample.messages or ())[-1]["content"]): sample.reward for sample in group.samples}
        assert replies == {"abc": 0.0, "a": 1.0, "abcd": 0.0, "abcde": 0.0}
        assert len(record.turns) == 5, "four players and the critic, whose turn is not trained"
        assert len({sample.facts["trace"] for sample in group.samples}) == 4
        for sample in group.samples:
            (turn,) = sample.turns
            tokens = sample.sequences[0].token_ids.tolist()
            assert (tokens[: turn.start], tokens[turn.start : turn.end]) in record.turns


async def test_a_wrong_number_of_samples_stops_the_run_with_the_right_one(tmp_path: Path) -> None:
    setting = settings("shortest-v1", agents=("player", "critic"))
    async with agent_setup(tmp_path, lambda _: "a<|im_end|>", settings=setting, limits=LIMITS) as (setup, _):
        with pytest.raises(RunError, match="set it to 4"):
            await make_rollout(setup)(first_row(setting))


def test_mistakes_are_errors_that_say_what_to_do() -> None:
    with pytest.raises(VerifiersError, match="taskset 'no-such' not found"):
        list(rows(taskset="no-such", python=str(PYTHON), args={}))
    with pytest.raises(VerifiersError, match="num_taks"):
        list(rows(taskset="addition-v1", python=str(PYTHON), args={"taskset": {"num_taks": 3}}))


def test_the_run_of_the_documentation_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {block.file_name: block.code for block in blocks_of(ROOT / "docs" / "verifiers.md")}
    (tmp_path / "addition_v1.py").write_text(files["addition_v1.py"], encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{tmp_path}")
    overrides = [f"env.python={PYTHON}", "rollout.max_seconds=300", "rollout.drop_constant_reward=false"]
    overrides += ["gate.groups_per_step=1", "gate.max_groups_in_flight=2", "rollout.completions_per_prompt=2"]
    run = SmallRun(tmp_path, overrides, config=files["run.toml"])
    summary = run.start().wait()
    assert summary["exit_code"] == 0, summary["stderr"]
    with open_run(run.directory) as record:
        durable = [group.group_id for group in record.groups(state=GroupState.DURABLE, limit=10)]
        group = record.samples(GroupId(durable[0]))
    assert len(durable) == 3
    assert group is not None
    for sample in group.samples:
        assert sample.reward is not None
        assert sample.sequences[0].has_logprobs
        assert [message["role"] for message in sample.messages or ()] == ["user", "assistant"]
