"""Reward functions in child processes: what a faulty one costs, and what it cannot affect."""

import asyncio
import io
import os
import textwrap
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from rollbook.contracts.errors import RunError
from rollbook.contracts.group import GroupId
from rollbook.contracts.trajectory import RolloutSample, TurnMark
from rollbook.rollout.rewards import scorer
from rollbook.rollout.rewards.messages import RewardCase
from rollbook.rollout.rewards.pool import RewardPool, open_reward_pool
from rollbook.rollout.settings import RewardFunction, RewardRules, Score
from rollbook.telemetry.events import EventLog
from rollbook.telemetry.metrics import read_metrics
from tests.parts.concurrency.processes import descendants_running, require_end_of_child
from tests.parts.concurrency.until import until
from tests.parts.rollout.dispatching import REPOSITORY, dispatching
from tests.parts.rollout.rewards import BAIT
from tests.parts.rollout.sink import LedgerSink, open_sink

pytestmark = pytest.mark.usefixtures("forked_processes")

PARTS = "tests.parts.rollout.rewards"


def rules(*names: str, **changed: Any) -> RewardRules:
    functions = tuple(RewardFunction(name=name, path=f"{PARTS}:{name}") for name in names)
    return RewardRules(functions=functions, **{"timeout_s": 30.0, "processes": 1, **changed})


@asynccontextmanager
async def pool_of(*names: str, **changed: Any) -> AsyncIterator[RewardPool]:
    log = EventLog("test", echo=io.StringIO())
    async with open_reward_pool(rules(*names, **changed), search_path=(REPOSITORY,), log=log) as pool:
        yield pool


@pytest.fixture
async def sink(tmp_path: Path) -> AsyncIterator[LedgerSink]:
    async with open_sink(tmp_path) as opened:
        yield opened


def case(response: str, **row: Any) -> RewardCase:
    return RewardCase(row=row, response=response)


def reward_processes() -> list[psutil.Process]:
    return descendants_running("rollbook.rollout.rewards.main")


async def test_a_catastrophic_regex_and_an_endless_loop_cost_their_own_sample_and_their_process_only() -> None:
    async with pool_of("regex", "endless", timeout_s=1.0) as pool:
        fine = await pool.score("regex", case("aaa"))
        stuck = await asyncio.gather(pool.score("regex", case(BAIT)), pool.score("endless", case("loop")))
        after = await pool.score("endless", case("fine"))
    assert fine.value == 1.0
    assert [score.value for score in stuck] == [None, None]
    assert all("did not end within 1 s" in str(score.cause) for score in stuck)
    assert pool.kills == 2
    assert after.value == 0.5, "the process was replaced"
    assert reward_processes() == []


async def test_a_function_that_exits_its_process_is_reported_with_the_exit_status() -> None:
    async with pool_of("crash") as pool:
        assert (await pool.score("crash", case("crash"))).cause == "its process exited with status 3"
        assert (await pool.score("crash", case("fine"))).value == 0.25


async def test_a_process_that_dies_while_it_is_idle_costs_no_sample() -> None:
    async with pool_of("crash") as pool:
        assert (await pool.score("crash", case("fine"))).value == 0.25
        (idle,) = reward_processes()
        idle.kill()
        await until(lambda: not psutil.pid_exists(idle.pid))
        await asyncio.sleep(0.1)  # another thread reports its end to the event loop
        assert (await pool.score("crash", case("fine"))).value == 0.25


async def test_what_is_no_number_is_never_zero() -> None:
    expected: dict[str, tuple[float | None, str | None]] = {
        "none": (None, None),
        "nan": (None, None),
        "inf": (None, "returned inf"),
        "text": (None, "returned a str"),
        "list": (None, "returned 1 numbers for an episode of 0 turns"),
        "raise": (None, "raised ValueError: no such score"),
        "true": (1.0, None),
        "int": (2.0, None),
    }
    async with pool_of("by_response") as pool:
        scores = {word: await pool.score("by_response", case(word)) for word in expected}
    for word, (value, cause) in expected.items():
        assert scores[word].value == value, word
        assert (scores[word].cause is None) if cause is None else (cause in str(scores[word].cause)), word


async def test_a_reward_function_of_trl_runs_unchanged() -> None:
    chat = ({"role": "user", "content": "2 + 3?"},)
    answered = (*chat, {"role": "assistant", "content": "5"})
    async with pool_of("trl_equal", "trl_of_prompts", "trl_scalar") as pool:
        assert (await pool.score("trl_equal", case("5", prompt="2 + 3?", answer="5"))).value == 1.0
        assert (await pool.score("trl_equal", case("6", question="2 + 3?", answer="5"))).value == 0.0
        conversation = RewardCase(row={"prompt": chat, "answer": "5"}, messages=answered, response="5")
        assert (await pool.score("trl_equal", conversation)).value == 1.0
        group = await pool.score_group("trl_equal", [case(text, prompt="", answer="5") for text in "456"])
        assert group.values == (0.0, 1.0, 0.0)
        assert (await pool.score("trl_of_prompts", case("abc", prompt="12", answer="5"))).value == 5.0
        wrong = await pool.score("trl_scalar", case("5", prompt=""))
        assert wrong.value is None
        assert "must return a list with one number; it returned 1.0" in str(wrong.cause)


async def test_async_functions_run_concurrently_and_only_the_slow_call_is_cancelled() -> None:
    async with pool_of("judge", timeout_s=1.0, concurrent=64) as pool:
        calls = [pool.score("judge", case("slow" if i == 7 else "fine")) for i in range(64)]
        scores = await asyncio.gather(*calls)
        assert pool.kills == 0
    assert [i for i, score in enumerate(scores) if score.value is None] == [7]
    assert "did not end within 1 s" in str(scores[7].cause)


async def test_an_async_function_that_blocks_is_killed_and_the_other_calls_of_its_process_are_repeated() -> None:
    async with pool_of("judge", timeout_s=1.0, concurrent=8) as pool:
        blocked, *others = await asyncio.gather(
            pool.score("judge", case("block")), *(pool.score("judge", case("fine")) for _ in range(5))
        )
    assert blocked.value is None
    assert [score.value for score in others] == [0.75] * 5


async def test_waiting_for_a_free_process_does_not_count_as_time_of_the_function() -> None:
    async with pool_of("pid", "endless", timeout_s=1.0) as pool:
        stuck = asyncio.create_task(pool.score("endless", case("loop")))
        scores = await asyncio.gather(*(pool.score("pid", case("")) for _ in range(20)))
        assert (await stuck).value is None
    assert all(score.value is not None for score in scores)
    assert {score.value for score in scores} != {float(os.getpid())}


@pytest.mark.parametrize(
    ("path", "cause"),
    [
        ("no_such_module:right", "rollout.rewards.functions.bad.path = 'no_such_module:right': no module"),
        (f"{PARTS}:absent", "has no 'absent'"),
        (f"{PARTS}:BAIT", "BAIT is not callable"),
    ],
)
async def test_a_function_that_cannot_be_found_stops_the_run_before_it_begins(path: str, cause: str) -> None:
    wrong = RewardRules(functions=(RewardFunction(name="bad", path=path),))
    with pytest.raises(RunError, match=cause):
        async with open_reward_pool(wrong, search_path=(REPOSITORY,), log=EventLog("test")):
            pass


@pytest.mark.parametrize(("deaths", "is_loaded"), [(2, True), (3, False)])
async def test_a_process_that_is_killed_while_it_loads_the_functions_is_replaced(
    tmp_path: Path, deaths: int, is_loaded: bool
) -> None:
    module = f"""
        import os, signal
        from pathlib import Path
        died = Path({str(tmp_path / "died")!r})
        number = len(died.read_text()) if died.exists() else 0
        if number < {deaths}:
            died.write_text("x" * (number + 1))
            os.kill(os.getpid(), signal.SIGKILL)
        def fine(case):
            return 1.0
    """
    (tmp_path / "killed_rewards.py").write_text(textwrap.dedent(module), encoding="utf-8")
    found = RewardRules(functions=(RewardFunction(name="fine", path="killed_rewards:fine"),), processes=1)
    opened = open_reward_pool(found, search_path=(str(tmp_path),), log=EventLog("test", echo=io.StringIO()))
    if is_loaded:
        async with opened as pool:
            assert (await pool.score("fine", case("any"))).value == 1.0
    else:
        with pytest.raises(RunError, match=r"killed by signal 9 \(SIGKILL\) \(3 attempts\)"):
            async with opened:
                pass
    assert reward_processes() == []


def test_an_endless_function_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    marker = tmp_path / "started"
    parent = textwrap.dedent(
        f"""
        import asyncio
        from pathlib import Path
        from tests.parts.concurrency.until import until
        from tests.services.test_rollout_rewards import BAIT, case, pool_of, reward_processes

        async def main():
            async with pool_of("regex", timeout_s=600) as pool:
                task = asyncio.create_task(pool.score("regex", case(BAIT, marker={str(marker)!r})))
                await until(Path({str(marker)!r}).exists)
                print(reward_processes()[0].pid, flush=True)
                await task

        asyncio.run(main())
        """
    )
    require_end_of_child(parent)


async def test_a_group_is_scored_by_weighted_functions_and_all_of_them_are_recorded(
    tmp_path: Path, sink: LedgerSink
) -> None:
    functions = {
        "brief": {"path": f"{PARTS}:brief", "weight": 0.5},
        "judge": {"path": f"{PARTS}:judge", "weight": 2.0},
        "crash": {"path": f"{PARTS}:crash", "weight": 0.0},
    }
    play = dispatching(tmp_path, [{}] * 3, rewards={"functions": functions, "environment_weight": 1.0}, sink=sink)
    await play.run()
    groups = [one.group for one in sink.submitted.values()]
    assert len(groups) == 3
    for sample in (sample for group in groups for sample in group.samples):
        metrics = sample.metrics
        assert metrics["reward/brief"] == -sample.num_trained
        assert (metrics["reward/judge"], metrics["reward/crash"]) == (0.75, 0.25)
        assert sample.reward == pytest.approx(metrics["reward/environment"] + 0.5 * metrics["reward/brief"] + 1.5)
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert any(row["reward/judge"] == 0.75 and row["reward/judge_std"] == 0.0 for row in rows)
    assert any((row["reward/brief_std"] or 0) > 0 for row in rows)
    assert sum(row["reward/judge_unscored"] for row in rows) == 0
    assert any(row["reward/seconds_max"] is not None for row in rows)


async def test_samples_that_cannot_be_scored_are_kept_counted_and_not_played_again(
    tmp_path: Path, sink: LedgerSink
) -> None:
    functions = {"endless": {"path": f"{PARTS}:endless"}}
    rewards = {"functions": functions, "timeout_s": 1.5, "processes": 2}
    play = dispatching(tmp_path, [{"action": "say_loop"}, {}], rewards=rewards, retry_budget=4, sink=sink)
    await play.run()
    dropped, submitted = sink.rows[GroupId("t0@0")], sink.submitted[GroupId("t0@0")]
    assert dropped.drop_reason is not None
    assert dropped.drop_reason.startswith("invalid: 0 of 4 samples scorable")
    assert "4 x reward endless: did not end within 1.5 s" in dropped.drop_reason
    assert [sample.reward for sample in submitted.group.samples] == [None] * 4
    assert submitted.outcome.retried_samples == 0
    assert sum(row["reward/endless_unscored"] for row in read_metrics(tmp_path / "metrics.jsonl")) == 4


async def test_a_function_may_score_each_turn_and_the_turns_keep_their_share_of_the_reward() -> None:
    scored = RewardCase(row={"turns": [0.5, -1.0]}, num_turns=2)
    async with pool_of("by_turn") as pool:
        found = await pool.score("by_turn", scored)
        short = await pool.score("by_turn", RewardCase(row={"turns": [0.5]}, num_turns=2))
        unknown = await pool.score("by_turn", RewardCase(row={"turns": [0.5, None]}, num_turns=2))
    assert (found.value, found.turns) == (-0.5, (0.5, -1.0))
    assert "1 numbers for an episode of 2 turns" in str(short.cause)
    assert (unknown.value, unknown.cause, unknown.turns) == (None, None, None)
    marks = tuple(TurnMark(sequence=0, start=at, end=at + 1) for at in (1, 2))
    played = RolloutSample([1, 2, 3], [0, -1, -1], [0, 1, 1], 3.0, turns=marks).with_turns(rewards=[1.0, 2.0])
    both = RewardRules(functions=(RewardFunction(name="by_turn", path="", weight=2.0),), environment_weight=0.1)
    sample = scorer.scored(played, both, {"by_turn": found})
    assert sample.turn_rewards is not None
    np.testing.assert_allclose(sample.turn_rewards, [1.1, -1.8])
    assert sample.reward == pytest.approx(sample.turn_rewards.sum())
    whole = RewardRules(functions=(RewardFunction(name="whole", path=""),))
    sample = scorer.scored(played, whole, {"whole": Score(value=1.0)})
    assert sample.turn_rewards is not None
    assert sample.turn_rewards.tolist() == [0.0, 0.0], "what the environment paid does not count"


def group_rules(name: str, **changed: Any) -> RewardRules:
    function = RewardFunction(name=name, path=f"{PARTS}:{name}", is_of_group=True)
    return RewardRules(functions=(function,), **{"timeout_s": 30.0, "processes": 1, **changed})


@pytest.mark.parametrize(
    ("returned", "cause"),
    [
        ([1.0], "returned 1 values for a group of 2 samples"),
        (0.5, "returned a float for a group of 2 samples"),
        ([1.0, "best"], "returned a str; it must return a number"),
        ([1e7, -1e7], "it must be between -1e+06 and 1e+06"),
    ],
)
async def test_a_function_of_groups_that_returns_no_list_of_numbers_makes_them_unscorable(
    returned: Any, cause: str
) -> None:
    log = EventLog("test", echo=io.StringIO())
    rules = group_rules("compared_badly")
    async with scorer.open_scorer(rules, decode=str, search_path=(REPOSITORY,), log=log) as opened:
        found = await opened.score_group(
            {"returned": returned},
            [RolloutSample([1, 2], [0, -1], [0, 1], 0.5), RolloutSample([1, 2], [0, -1], [0, 1], 0.5)],
        )
    assert [sample.reward for sample in found] == [None, None]
    assert all(cause in str(sample.invalid_cause) for sample in found)


@pytest.mark.parametrize("is_of_group", [False, True])
def test_an_answer_without_a_trained_token_and_a_reward_beyond_all_limits_are_unscorable(is_of_group: bool) -> None:
    function = RewardFunction(name="f", path="", weight=1e10, is_of_group=is_of_group)
    marks = (TurnMark(sequence=0, start=1, end=2),)
    empty = RolloutSample([1, 2], [0, 0], [0, 0], None, invalid_cause=scorer.TO_BE_SCORED, turns=marks)
    whole = RolloutSample([1, 2], [0, -1], [0, 1], None, invalid_cause=scorer.TO_BE_SCORED, turns=marks)
    score = scorer.with_group_scores if is_of_group else scorer.scored
    causes = [
        score(sample, RewardRules(functions=(function,)), {"f": value}).invalid_cause
        for sample, value in ((empty, Score(value=0.0)), (whole, Score(value=1.0)), (whole, Score(value=1e300)))
    ]
    assert causes == [
        "rollout.rewards: a scored sample needs at least one trained token",
        "rollout.rewards: reward is 10000000000.0; it must be between -1e+06 and 1e+06",
        "rollout.rewards: reward is inf; use None and an invalid_cause for a sample that could not be scored",
    ]


async def test_a_failed_call_for_a_group_is_repeated_and_a_failure_that_stays_is_never_zero(tmp_path: Path) -> None:
    log = EventLog("test", echo=io.StringIO())
    rules = group_rules("compared_badly")
    row = {"calls": str(tmp_path / "calls"), "failing": 2}
    async with scorer.open_scorer(rules, decode=str, search_path=(REPOSITORY,), log=log) as opened:
        passed = await opened.score_group(
            row, [RolloutSample([1, 2], [0, -1], [0, 1], 0.5), RolloutSample([1, 2], [0, -1], [0, 1], 0.5)]
        )
        stayed = await opened.score_group(
            {**row, "failing": 1_000},
            [RolloutSample([1, 2], [0, -1], [0, 1], 0.5), RolloutSample([1, 2], [0, -1], [0, 1], 0.5)],
        )
    assert [sample.reward for sample in passed] == [1.0, 1.0]
    assert [sample.reward for sample in stayed] == [None, None]
    assert all("raised ConnectionError: no ranking today" in str(sample.invalid_cause) for sample in stayed)
    assert len((tmp_path / "calls").read_text()) == 6


async def test_functions_of_groups_run_after_those_of_samples_and_see_their_scores_and_what_is_solved(
    tmp_path: Path, sink: LedgerSink
) -> None:
    functions = {
        "right": {"path": f"{PARTS}:right", "weight": 0.0},
        "pass_at_2": {"path": "pass_at_2"},
        "brief": {"path": f"{PARTS}:brief", "weight": 0.001},
    }
    rewards = {"functions": functions, "solved_by": "right"}
    await dispatching(tmp_path, [{"answer": "3"}] * 3, rewards=rewards, sink=sink).run()
    for submitted in sink.submitted.values():
        samples = submitted.group.samples
        solved = [sample.solved for sample in samples]
        num_others = len(samples) - 1
        for sample in samples:
            assert sample.solved == (sample.metrics["reward/right"] == 1.0)
            credit = 1.0 if sample.solved else sum(map(bool, solved)) / num_others
            assert sample.metrics["reward/pass_at_2"] == pytest.approx(credit)
            assert sample.reward == pytest.approx(credit - 0.001 * sample.num_trained)
    stored = [sample for submitted in sink.submitted.values() for sample in submitted.group.samples]
    assert all(sample.metrics["answer_tokens"] == sample.num_trained for sample in stored)
    lengths = [
        (row["rollout/thought_len"], row["rollout/answer_len"]) for row in read_metrics(tmp_path / "metrics.jsonl")
    ]
    assert any(answer for _, answer in lengths)
    assert not any(thought for thought, _ in lengths), "this policy does not think"
