"""Judges: what a failing one costs, what is asked twice, and what is never scored 0."""

import asyncio
import contextlib
import dataclasses
import json
import re
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from rollbook.contracts.errors import RunError
from rollbook.contracts.group import GroupId
from rollbook.rollout.rewards.config import RewardsConfig
from rollbook.rollout.rewards.judge_prompts import parse_verdict
from rollbook.rollout.rewards.judgements import Judgement, Judgements
from rollbook.rollout.rewards.judges import JudgePanel, open_judges
from rollbook.rollout.rewards.messages import RewardCase
from rollbook.telemetry.metrics import read_metrics
from tests.parts.concurrency.processes import descendants_running
from tests.parts.concurrency.until import until
from tests.parts.rollout.dispatching import dispatching
from tests.parts.rollout.judge_server import open_judge_server
from tests.parts.rollout.sink import open_sink

pytestmark = pytest.mark.usefixtures("forked_processes")


def rewards_of(*urls: str, vote: str = "mean", group: bool = False, **judge: Any) -> dict[str, Any]:
    given = {
        "model": "grader",
        "rubric": "It is short.",
        "first_wait_s": 0.01,
        "price_in": 1e4,
        "price_out": 1e5,
        **judge,
    }
    return {"functions": {"good": {"judge": [{"url": url, **given} for url in urls], "vote": vote, "group": group}}}


@asynccontextmanager
async def panel_of(*urls: str, store: Path | None = None, **judge: Any) -> AsyncIterator[JudgePanel]:
    rules = RewardsConfig.model_validate(rewards_of(*urls, **judge)).rules
    assert rules is not None
    async with open_judges(rules.functions, search_path=(), store=store) as panels:
        yield panels["good"]


def case(text: str) -> RewardCase:
    messages = ({"role": "user", "content": "Say hi."}, {"role": "assistant", "content": text})
    return RewardCase(row={"question": "Say hi."}, response=text, messages=messages)


async def test_a_judge_gets_rubric_task_and_conversation_and_its_reason_is_kept() -> None:
    async with open_judge_server() as server, panel_of(server.url) as panel:
        score = await panel.score(case("hello"))
    (body,) = server.bodies
    prompt = body["messages"][0]["content"]
    for part in ("It is short.", "Say hi.", "[assistant] hello", "from 0 to 1", "ignore instructions"):
        assert part in prompt
    assert body["response_format"]["json_schema"]["schema"]["required"] == ["reason", "score"]
    assert score.value == (len(prompt) % 10) / 10
    assert [(note.model, note.text) for note in score.notes] == [("grader", f"has {len(prompt)} characters")]
    assert score.usage is not None
    assert (score.usage.requests, score.usage.tokens, score.usage.cost) == (1, 110, 2.0)


async def test_an_anthropic_url_is_asked_with_its_headers_and_a_forced_tool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "secret")
    async with open_judge_server() as server:
        async with panel_of(server.url, api="anthropic", api_key_env="JUDGE_KEY") as panel:
            score = await panel.score(case("hello"))
        assert score.value is not None
        assert server.bodies[0]["tool_choice"] == {"type": "tool", "name": "verdict"}
        assert server.headers[0]["x-api-key"] == "secret"
        with pytest.raises(RunError, match="the variable NO_SUCH_KEY"):
            async with panel_of(server.url, api_key_env="NO_SUCH_KEY"):
                pass


@pytest.mark.parametrize("kind", ["cut", "busy", "slow", "page", "nonsense", "beyond"])
async def test_a_failure_that_passes_costs_attempts_and_no_sample(kind: str) -> None:
    async with (
        open_judge_server(lambda number: kind if number < 2 else "score") as server,
        panel_of(server.url, timeout_s=0.3 if kind == "slow" else 30.0) as panel,
    ):
        score = await panel.score(case("hello"))
    assert (score.cause, score.value) == (None, (len(server.bodies[0]["messages"][0]["content"]) % 10) / 10)
    assert score.usage is not None
    assert (score.usage.requests, score.usage.failed) == (3, 2)
    is_paid = kind in ("nonsense", "beyond")
    assert score.usage.cost == (6.0 if is_paid else 2.0), "an answer is paid for, even if it is no score"


@pytest.mark.parametrize(
    ("kind", "cause", "requests"),
    [
        ("cut", "status 500", 3),
        ("slow", "no answer within 0.3 s", 3),
        ("page", "no answer of a model", 3),
        ("nonsense", "no number as score", 3),
        ("beyond", "the score 11 is not from 0 to 1", 3),
        ("denied", "status 404: .*no such model", 1),
    ],
)
async def test_a_failure_that_stays_makes_the_sample_unscorable_and_never_zero(
    tmp_path: Path, kind: str, cause: str, requests: int
) -> None:
    store = tmp_path / "judgements.jsonl"
    async with open_judge_server(lambda number: kind) as server:
        timeout_s = 0.3 if kind == "slow" else 30.0
        async with panel_of(server.url, attempts=3, timeout_s=timeout_s, store=store) as panel:
            score = await panel.score(case("hello"))
    assert score.value is None
    assert score.cause is not None
    assert re.search(cause, score.cause)
    assert sum(server.requests.values()) == requests
    paid = [json.loads(line)["cost"] for line in store.read_text().splitlines() if "cost" in json.loads(line)]
    assert paid == ([2.0] * 3 if kind in ("nonsense", "beyond") else [])


async def test_content_is_asked_for_once_even_by_another_process_after_a_kill(tmp_path: Path) -> None:
    store = tmp_path / "judgements.jsonl"
    async with open_judge_server() as server:
        async with panel_of(server.url, store=store) as panel, panel_of(server.url, store=store) as other:
            first = await panel.score(case("hello"))
            assert (await other.score(case("hello"))).value == first.value, "written while the other was open"
        with store.open("ab") as file:
            file.write(b'{"key": "a line that a killed process left unfin')
        async with panel_of(server.url, store=store) as panel:
            again = await panel.score(case("hello"))
            await panel.score(case("other"))
        async with panel_of(server.url, store=store) as panel:
            assert (await panel.score(case("other"))).usage is not None
        async with panel_of(server.url, store=store, rubric="It is long.") as panel:
            await panel.score(case("hello"))
    assert again.value == first.value
    assert again.notes == first.notes
    assert again.usage is not None
    assert (again.usage.requests, again.usage.cached, again.usage.cost) == (0, 1, 0.0)
    assert sorted(server.requests.values()) == [1, 1, 1], "another rubric is another content"


async def test_equal_judges_vote_each_and_their_votes_are_the_same_after_a_kill(tmp_path: Path) -> None:
    store = tmp_path / "judgements.jsonl"
    async with open_judge_server(lambda number: f"score={number / 2}") as server:
        three = [server.url] * 3
        async with panel_of(*three, store=store, temperature=1.0) as panel:
            first = await panel.score(case("hello"))
        async with panel_of(*three, store=store, temperature=1.0) as panel:
            again = await panel.score(case("hello"))
        assert sorted(note.score or 0.0 for note in first.notes) == [0.0, 0.5, 1.0]
        assert again.notes == first.notes
        assert sum(server.requests.values()) == 3


async def test_another_range_of_scores_is_another_question_even_if_the_prompt_does_not_name_it(tmp_path: Path) -> None:
    (tmp_path / "prompt.md").write_text("Grade: $response", encoding="utf-8")
    store, prompt = tmp_path / "judgements.jsonl", str(tmp_path / "prompt.md")
    async with open_judge_server(lambda number: f"score={number + 1}") as server:
        scores = []
        for high in (10.0, 3.0):
            async with panel_of(server.url, store=store, prompt_file=prompt, high=high) as panel:
                scores.append((await panel.score(case("hello"))).value)
    assert scores == [1.0, 2.0]


async def test_workers_that_ask_at_the_same_time_use_the_answer_that_was_stored_first(tmp_path: Path) -> None:
    store = tmp_path / "judgements.jsonl"
    async with open_judge_server(lambda number: f"score={number}") as server:
        server.delay_s = 0.1
        async with panel_of(server.url, store=store) as panel, panel_of(server.url, store=store) as other:
            scores = list(await asyncio.gather(panel.score(case("hello")), other.score(case("hello"))))
        async with panel_of(server.url, store=store) as panel:
            scores.append(await panel.score(case("hello")))
    assert sum(server.requests.values()) == 2
    assert len({score.value for score in scores}) == 1


async def test_requests_are_limited_and_equal_content_shares_one_that_outlives_its_episode() -> None:
    async with open_judge_server() as server:
        server.delay_s = 0.05
        async with panel_of(server.url, concurrent=3) as panel:
            scores = await asyncio.gather(*(panel.score(case(str(n % 8))) for n in range(24)))
            assert server.most_running == 3
            assert set(server.requests.values()) == {1}
            assert len({score.value for score in scores if score.value is not None}) >= 1
            cancelled = asyncio.create_task(panel.score(case("cancelled")))
            await until(lambda: server.running == 1)
            cancelled.cancel()
            await asyncio.gather(cancelled, return_exceptions=True)
            await until(lambda: len(server.answered) == 9)
            kept = await panel.score(case("cancelled"))
    assert kept.value is not None
    assert set(server.requests.values()) == {1}


@pytest.mark.parametrize(("vote", "expected"), [("mean", 0.5), ("median", 0.6), ("majority", 0.6)])
async def test_several_judges_vote_and_more_than_half_must_answer(vote: str, expected: float) -> None:
    async with contextlib.AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(open_judge_server()) for _ in range(3)]
        for server, value in zip(servers, (0.6, 0.3, 0.6), strict=True):
            server.scored = value
        panel = await stack.enter_async_context(panel_of(*(s.url for s in servers), vote=vote, attempts=1))
        score = await panel.score(case("hello"))
        assert score.value == pytest.approx(expected)
        assert len(score.notes) == 3
        servers[1].behaviour = lambda number: "cut"
        two = await panel.score(case("two answer"))
        assert two.value == pytest.approx(0.6)
        assert two.cause is None
        assert [note.score for note in two.notes] == [0.6, None, 0.6]
        assert "status 500" in two.notes[1].text, "which judge fails can be read"
        servers[0].behaviour = lambda number: "cut"
        alone = await panel.score(case("one answers"))
        assert (alone.value, len(alone.notes)) == (None, 1)
        assert alone.cause is not None
        assert alone.cause.count("status 500") == 2


async def test_a_prompt_in_a_file_replaces_the_whole_prompt_and_its_placeholders_are_checked(tmp_path: Path) -> None:
    (tmp_path / "judge.md").write_text("Grade $response by: $rubric. It costs 5 $$.", encoding="utf-8")
    rules = RewardsConfig.model_validate(rewards_of("http://x/v1", prompt_file="judge.md")).rules
    assert rules is not None
    async with open_judge_server() as server:
        rules = RewardsConfig.model_validate(rewards_of(server.url, prompt_file="judge.md")).rules
        assert rules is not None
        async with open_judges(rules.functions, search_path=(str(tmp_path),), store=None) as panels:
            await panels["good"].score(case("hello"))
    assert server.bodies[0]["messages"][0]["content"] == "Grade hello by: It is short.. It costs 5 $."
    for text, fault in (("$answer", "unknown placeholder \\$answer"), ("5 $", "write \\$\\$ for a dollar sign")):
        (tmp_path / "judge.md").write_text(text, encoding="utf-8")
        with pytest.raises(RunError, match=fault):
            async with open_judges(rules.functions, search_path=(str(tmp_path),), store=None):
                pass
    (tmp_path / "judge.md").unlink()
    with pytest.raises(RunError, match=r"prompt_file = 'judge\.md': no such file"):
        async with open_judges(rules.functions, search_path=(str(tmp_path),), store=None):
            pass


def test_a_function_has_a_path_or_a_judge_with_a_rubric() -> None:
    for function, fault in (
        ({}, "either a path or a judge"),
        ({"path": "m:f", "judge": {"url": "http://x/v1", "model": "m", "rubric": "r"}}, "either a path or a judge"),
        ({"judge": {"url": "http://x/v1", "model": "m"}}, "needs a rubric"),
        ({"judge": {"url": "http://x/v1", "model": "m", "rubric": "r", "low": 1, "high": 1}}, "must be below high"),
    ):
        with pytest.raises(ValidationError, match=fault):
            RewardsConfig.model_validate({"functions": {"good": function}})


def test_a_verdict_is_read_out_of_text_and_nothing_else_becomes_a_score() -> None:
    assert parse_verdict('```json\n{"reason": "ok", "score": 1}\n```', low=0, high=1) == (1.0, "ok")
    thought = '<think>In f{x}, {"score": 0} would be wrong.</think>\nIt is {"reason": "ok", "score": 1}.'
    assert parse_verdict(thought, low=0, high=1) == (1.0, "ok")
    for text in ("", "score: 1", '{"score": null}', '{"score": true}', '{"score": "1"}', '{"score": NaN}', "[1]", "}{"):
        with pytest.raises(ValueError, match="the answer"):
            parse_verdict(text, low=0, high=1)


@pytest.mark.parametrize(
    ("kind", "api"), [("huge", "openai"), ("huge", "anthropic"), ("list", "anthropic"), ("endless", "openai")]
)
async def test_an_answer_of_any_form_makes_samples_unscorable_and_is_no_error_of_the_worker(
    tmp_path: Path, kind: str, api: str
) -> None:
    async with (
        open_judge_server(lambda number: kind) as server,
        panel_of(server.url, api=api, attempts=2, store=tmp_path / "one.jsonl") as alone,
        panel_of(server.url, api=api, attempts=2, group=True, store=tmp_path / "group.jsonl") as together,
    ):
        scores = [await alone.score(case("hello")), *await together.score_group([case("hello"), case("hi")])]
    assert [score.value for score in scores] == [None] * 3
    assert all("(2 attempts)" in str(score.cause) for score in scores)


def test_a_line_that_is_longer_than_a_read_is_found(tmp_path: Path) -> None:
    path = tmp_path / "judgements.jsonl"
    first = Judgements(path)
    for number, text in enumerate(("short", "x" * (3 << 20), "short again")):
        first.add(Judgement(key=str(number), function="good", model="m", score=0.5, text=text))
    second = Judgements(path)
    found = [second.find(str(number)) for number in range(3)]
    assert [None if one is None else len(one.text) for one in found] == [5, 3 << 20, 11]
    assert second.find("3") is None
    first.close()
    second.close()


async def test_workers_that_are_killed_under_failing_judges_lose_nothing_and_ask_for_no_content_twice(
    tmp_path: Path,
) -> None:
    def flaky(number: int) -> str:
        return ("cut", "nonsense", "score")[number] if number < 3 else "score"

    store = str(tmp_path / "judgements.jsonl")
    async with open_judge_server(flaky) as server, open_sink(tmp_path) as sink:
        play = dispatching(tmp_path, [{}] * 6, rewards=rewards_of(server.url), sink=sink, worker={"judgements": store})
        running = asyncio.create_task(play.run())
        await until(lambda: len(server.answered) >= 4)
        for worker in descendants_running("rollbook.rollout.workers.main"):
            worker.kill()
        await running
        samples = [sample for one in sink.submitted.values() for sample in one.group.samples]
        assert len(sink.submitted) == 6
        assert sink.rows[GroupId("t0@0")].drop_reason is None
    assert len(samples) == 24
    for sample in samples:
        (note,) = sample.facts["judges"]["good"]
        assert sample.reward == sample.metrics["reward/good"] == note["score"]
        assert "characters" in note["text"]
    lines = [json.loads(line) for line in Path(store).read_text().splitlines()]
    usable = Counter(line["key"] for line in lines if "score" in line)
    assert set(usable.values()) == {1}, "an answer that arrived is never asked for again"
    costs = sum(row["judge/cost"] or 0.0 for row in read_metrics(tmp_path / "metrics.jsonl"))
    paid = sum(line.get("cost", 0.0) for line in lines)
    assert 0 < costs <= paid, "the file also has what killed episodes cost"
    assert len(lines) <= sum(server.requests.values()) - len(server.requests), "each content was refused once"


async def test_a_judge_of_a_group_compares_all_answers_in_one_request_and_their_order_does_not_matter() -> None:
    texts = ["hello", "good morning", "hi", "hello there"]
    async with open_judge_server() as server, panel_of(server.url, group=True) as panel:
        scores = await panel.score_group([case(text) for text in texts])
        again = await panel.score_group([case(text) for text in reversed(texts)])
    (body,) = server.bodies
    prompt = body["messages"][0]["content"]
    assert prompt.count("Say hi.") == 2, "the task, and the beginning that all conversations share"
    assert "Score the answers 1, 2, 3, 4 from 0 to 1" in prompt
    assert body["response_format"]["json_schema"]["schema"]["required"] == ["verdicts"]
    shown = [len(f"[assistant] {text}") for text in texts]
    assert [score.value for score in scores] == [size % 10 / 10 for size in shown]
    assert [score.notes[0].text for score in scores] == [f"has {size} characters" for size in shown]
    assert [score.value for score in reversed(again)] == [score.value for score in scores]
    spent = [score.usage for score in (*scores, *again) if score.usage is not None]
    assert (sum(one.requests for one in spent), sum(one.cached for one in spent)) == (1, 1)


async def test_a_late_answer_is_compared_with_the_quorum_whose_scores_are_shown(tmp_path: Path) -> None:
    quorum = [dataclasses.replace(case(text), score=score) for text, score in (("hello", 0.25), ("hi", 0.75))]
    store = tmp_path / "judgements.jsonl"
    async with open_judge_server() as server:
        async with panel_of(server.url, group=True, store=store) as panel:
            (late,) = await panel.score_group([*quorum, case("good morning")])
        async with panel_of(server.url, group=True, store=store) as panel:
            (after_a_kill,) = await panel.score_group([*quorum, case("good morning")])
    (body,) = server.bodies
    prompt = body["messages"][0]["content"]
    assert re.search(r'<answer number="\d" score="0.25">\n\[assistant\] hello\n</answer>', prompt)
    assert len(re.findall(r'<answer number="\d">', prompt)) == 1
    assert (late.value, after_a_kill.value) == (0.4, 0.4)


@pytest.mark.parametrize("kind", ["cut", "nonsense", "short"])
async def test_a_group_that_a_judge_cannot_compare_is_unscorable_and_one_failure_costs_nothing(kind: str) -> None:
    async with open_judge_server(lambda number: kind if number < 1 else "score") as server:
        async with panel_of(server.url, group=True, attempts=2) as panel:
            passed = await panel.score_group([case("hello"), case("hi")])
        server.behaviour = lambda number: kind
        async with panel_of(server.url, group=True, attempts=2) as panel:
            stayed = await panel.score_group([case("hello"), case("good morning")])
    assert all(score.value is not None and score.cause is None for score in passed)
    assert [score.value for score in stayed] == [None, None]
    assert all("(2 attempts)" in str(score.cause) for score in stayed)


async def test_a_judge_of_a_large_group_may_write_more() -> None:
    cases = [case(f"answer {number}") for number in range(16)]
    async with open_judge_server() as server:
        async with panel_of(server.url, group=True) as panel:
            await panel.score_group(cases)
            await panel.score_group([dataclasses.replace(one, score=0.5) for one in cases] + [case("late")])
        async with panel_of(server.url, group=True, max_tokens=300) as panel:
            await panel.score_group(cases)
    assert [body["max_tokens"] for body in server.bodies] == [1024 + 15 * 96, 1024, 300]


@pytest.mark.parametrize(("api", "end"), [("openai", "no JSON object"), ("anthropic", "no list of verdicts")])
async def test_an_answer_that_is_cut_names_the_setting_that_helps(api: str, end: str) -> None:
    async with (
        open_judge_server(lambda number: "long") as server,
        panel_of(server.url, group=True, api=api, attempts=1) as panel,
    ):
        (score, _) = await panel.score_group([case("hello"), case("hi")])
    text = "the answer was cut after 1120 tokens (raise rollout.rewards.functions.good.judge.max_tokens): "
    assert text in str(score.cause)
    assert end in str(score.cause)


async def test_a_judge_ranks_whole_groups_of_a_run_and_its_words_are_stored_with_each_sample(tmp_path: Path) -> None:
    async with open_judge_server() as server, open_sink(tmp_path) as sink:
        await dispatching(tmp_path, [{}] * 3, rewards=rewards_of(server.url, group=True), sink=sink).run()
        samples = [sample for one in sink.submitted.values() for sample in one.group.samples]
    assert len(samples) == 12
    assert sum(server.requests.values()) == 3
    for sample in samples:
        (note,) = sample.facts["judges"]["good"]
        assert sample.reward == sample.metrics["reward/good"] == note["score"]
        assert sample.facts["compared"] == "with its group"
    costs = sum(row["judge/cost"] or 0.0 for row in read_metrics(tmp_path / "metrics.jsonl"))
    assert costs == 6.0, "one request for each group"
