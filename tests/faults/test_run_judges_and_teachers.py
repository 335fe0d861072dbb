"""A run with a failing judge and a teacher is killed and resumed: no failure is scored 0, and no request is repeated."""

import asyncio
import itertools
import json
import os
import signal
import tomllib
from collections import Counter
from pathlib import Path

import pytest
import tomli_w

from rollbook.run.reader import open_run
from rollbook.telemetry.metrics import read_metrics
from rollbook.trainer.model.model_directory import prepare_model_directory
from rollbook.trainer.model_config import ModelBuildConfig, ModelConfig
from tests.parts.concurrency.processes import require_end
from tests.parts.rollout.judge_server import open_judge_server
from tests.parts.rollout.teacher_server import counted
from tests.parts.run.small import CONFIG, END_S, SmallRun, rollbook
from tests.services.openai_api.conftest import policy_process

STEPS, SCORE, CONCURRENT = 14, 0.6, 4
TEMPLATE = "{% for m in messages %}{{ m.content }} {% endfor %}"
FAILURES = ("cut", "nonsense", "slow", "score", "busy", "page", "beyond", "score")


def run_of(directory: Path, judge_url: str, teacher_url: str) -> SmallRun:
    config = tomllib.loads(CONFIG)
    config["model"]["build"]["chat_template"] = TEMPLATE
    judge = {
        "url": judge_url,
        "model": "grader",
        "rubric": "It is right.",
        "timeout_s": 1.0,
        "first_wait_s": 0.05,
        "concurrent": CONCURRENT,
        "price_in": 1e4,
    }
    config["rollout"] |= {
        "function": "chat",
        "rewards": {"environment_weight": 1.0, "functions": {"good": {"judge": judge}}},
        "teacher": {"url": teacher_url, "model": "teacher", "concurrent": CONCURRENT},
    }
    config["trainer"] |= {"max_steps": STEPS, "distill_coef": 0.1, "checkpoint_every": 4}
    config["ledger"] = {"keep_payloads": True}
    return SmallRun(directory, config=tomli_w.dumps(config))


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_a_killed_run_asks_no_judge_and_no_teacher_again_and_failures_are_never_scored(tmp_path: Path) -> None:
    build = ModelBuildConfig.model_validate({**tomllib.loads(CONFIG)["model"]["build"], "chat_template": TEMPLATE})
    teacher = prepare_model_directory(ModelConfig(build=build), tmp_path / "teacher", seed=9)
    kinds = itertools.cycle(FAILURES)
    with policy_process(tmp_path, "--model", str(teacher), "--served-model-name", "teacher") as policy:
        async with (
            open_judge_server(lambda number: next(kinds) if number == 0 else "score") as judge,
            counted(f"{policy.url}/v1") as (teacher_url, bodies),
        ):
            judge.scored = SCORE
            run = run_of(tmp_path, judge.url, teacher_url).start()
            try:
                await asyncio.to_thread(run.until, lambda: run.step() >= 6, what="step 6")
                processes = run.descendants()
                os.killpg(run.process.pid, signal.SIGKILL)
                await asyncio.to_thread(require_end, processes, within_s=END_S)
                run.process.wait()
                asked = len(bodies), sum(judge.requests.values())
                summary = await asyncio.to_thread(run.start().wait)
            finally:
                run.stop()
    assert (summary["exit_code"], summary["steps"], summary["audit"]) == (0, STEPS, "ok"), summary["stderr"]
    assert asked[0] < len(bodies), "the resumed run asked for new content"
    assert asked[1] < sum(judge.requests.values())

    lines = [json.loads(line) for line in (run.directory / "judgements.jsonl").read_text().splitlines()]
    usable = Counter(line["key"] for line in lines if "cause" not in line)
    assert set(usable.values()) == {1}
    # What was answered at the moment of the kill, and not stored yet, is asked for once more.
    assert sum(judge.answered.values()) - len(usable) <= CONCURRENT
    contents = Counter(json.dumps(body["prompt"]) for body in bodies)
    assert len(bodies) - len(contents) <= CONCURRENT
    bill, paid = sum(line.get("cost", 0.0) for line in lines), sum(judge.paid.values())
    assert paid - CONCURRENT <= bill <= paid, "each answer costs 1, a score or not; failures cost nothing"
    assert 0 < sum(row.get("judge/cost") or 0.0 for row in read_metrics(run.directory / "metrics.jsonl")) <= bill

    with open_run(run.directory) as record:
        samples = [sample for batch in record.batches(STEPS) for group in batch.groups for sample in group.samples]
    assert {sample.metrics["reward/good"] for sample in samples if sample.reward is not None} == {SCORE}
    assert all(row.teacher_logprobs is not None for s in samples if s.reward is not None for row in s.sequences)
    audit = json.loads(rollbook("audit", str(run.directory), "--full", "--json").stdout)
    assert audit["ok"], audit["violations"]
    replayed = rollbook("replay", str(run.directory), "--verify", "--json")
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr
