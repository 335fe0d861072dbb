"""A teacher behind a real policy server scores the tokens that a policy sampled."""

import asyncio
import json
import signal
import sqlite3
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from aiohttp import ClientSession
from pydantic import ValidationError

from rollbook.contracts.errors import RunError
from rollbook.contracts.policy import SamplingParams
from rollbook.contracts.trajectory import RolloutSample, TokenRow
from rollbook.rollout.chat.tokenizer import ModelTokenizer
from rollbook.rollout.config import RolloutConfig
from rollbook.rollout.rewards import teacher_scores
from rollbook.rollout.rewards.config import TeacherConfig
from rollbook.rollout.rewards.teacher import Teachers, open_teachers
from rollbook.rollout.rewards.teacher_scores import ScoreStore, SequenceScores
from rollbook.telemetry.metrics import read_metrics
from rollbook.trainer.checkpoints.checkpoints import initial_learner
from tests.parts.inference.chat_model import chat_model
from tests.parts.rollout.teacher_server import counted
from tests.parts.run.small import SmallRun, rollbook
from tests.parts.trainer.batches import quick, tiny_model_dir
from tests.services.openai_api.conftest import policy_process


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_model(tmp_path_factory.mktemp("teacher") / "model")


@pytest.fixture(scope="module")
def url(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with policy_process(
        tmp_path_factory.mktemp("serve"), "--model", str(model_dir), "--served-model-name", "teacher"
    ) as server:
        yield f"{server.url}/v1"


@pytest.fixture(scope="module")
def tokenizer(model_dir: Path) -> ModelTokenizer:
    return ModelTokenizer.from_directory(model_dir)


@asynccontextmanager
async def teachers_of(*configs: TeacherConfig, tokenizer: ModelTokenizer, **opened: Any) -> AsyncIterator[Teachers]:
    async with open_teachers([config.settings for config in configs], tokenizer, **opened) as teachers:
        yield teachers


def sample_of(tokenizer: ModelTokenizer, text: str, *, trained: int = 5, version: int = -1) -> RolloutSample:
    ids = tokenizer.encode(text)
    mask = np.arange(len(ids)) >= len(ids) - trained
    row = TokenRow.of(
        token_ids=ids, logprobs=np.where(mask, -1.0, 0.0), loss_mask=mask, versions=np.where(mask, version, -1)
    )
    return RolloutSample(sequences=(row,), reward=1.0)


def dense_logprobs(model_dir: Path, ids: list[int]) -> torch.Tensor:
    """Of every token after each position."""
    torch.set_num_threads(1)
    learner = initial_learner(model_dir, quick())
    with torch.no_grad():
        return torch.log_softmax(learner.model.module(torch.tensor([ids])).logits[0].double(), -1)


async def test_the_scores_of_a_teacher_are_its_logprobs_and_a_failing_one_makes_the_sample_unscorable(
    url: str, model_dir: Path, tokenizer: ModelTokenizer
) -> None:
    sample = sample_of(tokenizer, "<user>hi\n<assistant>hello")
    ids = sample.sequences[0].token_ids.tolist()
    async with teachers_of(TeacherConfig(url=url, model="teacher", top_k=6), tokenizer=tokenizer) as teachers:
        scored = (await teachers.score({}, sample)).sequences[0]
    expected = dense_logprobs(model_dir, ids)[-6:-1]
    assert scored.teacher_logprobs is not None
    assert scored.teacher_top_ids is not None
    assert scored.teacher_top_logprobs is not None
    assert np.isnan(scored.teacher_logprobs[:-5]).all(), "only tokens of the policy are compared"
    assert (scored.teacher_top_ids[:-5] == -1).all()
    np.testing.assert_allclose(scored.teacher_logprobs[-5:], expected[range(5), ids[-5:]], atol=2e-3)
    values, tops = expected.topk(6, dim=-1)
    assert scored.teacher_top_ids[-5:].tolist() == tops.tolist()
    np.testing.assert_allclose(scored.teacher_top_logprobs[-5:], values, rtol=2e-3, atol=2e-3)
    async with counted(url) as (other, _):
        config = TeacherConfig(url=other, model="teacher", attempts=2, first_wait_s=0.01)
        async with teachers_of(config, tokenizer=tokenizer) as teachers:
            teachers._teachers[0]._url = "http://127.0.0.1:9/v1"
            lost = await teachers.score({}, sample)
    assert lost.reward is None
    assert lost.invalid_cause is not None
    assert lost.invalid_cause.startswith(f"teacher teacher at {other}: ")
    assert "refused" in lost.invalid_cause


async def test_a_teacher_with_other_token_ids_or_without_scores_is_refused(
    url: str, model_dir: Path, tokenizer: ModelTokenizer, tmp_path: Path
) -> None:
    config = TeacherConfig(url=url, model="teacher")
    other = ModelTokenizer.from_directory(tiny_model_dir(tmp_path / "words"))
    with pytest.raises(RunError, match=r"another tokenizer than the policy: token 0 of a text.*use a teacher with the"):
        async with teachers_of(config, tokenizer=other):
            pass
    nowhere = TeacherConfig(url="http://127.0.0.1:9/v1", model="teacher", attempts=1)
    with pytest.raises(
        RunError, match=r"nothing answers at http://127\.0\.0\.1:9/v1 \(.*refused.*\): start the teacher's server"
    ):
        async with teachers_of(nowhere, tokenizer=other):
            pass
    # Equal in every usual text: only a special token is another one.
    file = model_dir / "tokenizer.json"
    special = next(token for token in json.loads(file.read_text())["added_tokens"] if token["special"])
    changed = tmp_path / "changed"
    changed.mkdir()
    for kept in model_dir.iterdir():
        text = kept.read_text(encoding="utf-8") if kept.suffix in (".json", ".jinja") else None
        if text is not None:
            changed.joinpath(kept.name).write_text(text.replace(special["content"], "<|other|>"), encoding="utf-8")
    renamed = ModelTokenizer.from_directory(changed)
    message = (
        rf"digest.*id {special['id']} is '.*' there and '<\|other\|>' here\. Please use a teacher.*tokenizer_check"
    )
    with pytest.raises(RunError, match=message):
        async with teachers_of(config, tokenizer=renamed):
            pass
    async with teachers_of(config.model_copy(update={"tokenizer_check": "text"}), tokenizer=renamed):
        pass


async def test_each_task_has_the_first_teacher_that_fits_it(url: str, tokenizer: ModelTokenizer) -> None:
    sample = sample_of(tokenizer, "<user>hi\n<assistant>hello")
    async with counted(url) as (maths, of_maths), counted(url) as (rest, of_rest):
        configs = [
            TeacherConfig(url=maths, model="teacher", tasks={"domain": "math*"}),
            TeacherConfig(url=rest, model="teacher", tasks={"level": "[0-3]"}),
        ]
        async with teachers_of(*configs, tokenizer=tokenizer) as teachers:
            assert (await teachers.score({"domain": "maths", "level": 2}, sample)).sequences[0].columns
            assert (await teachers.score({"domain": "code", "level": 3}, sample)).sequences[0].columns
            assert not (await teachers.score({"domain": "code", "level": 12}, sample)).sequences[0].columns
    assert (len(of_maths), len(of_rest)) == (1, 1)


async def test_the_policy_with_a_context_is_its_own_teacher_at_the_version_that_sampled_or_one_other(
    url: str, model_dir: Path, tokenizer: ModelTokenizer
) -> None:
    body = {"prompt": [5, 6], "max_tokens": 0, "echo": True, "logprobs": 1}
    async with ClientSession() as session, session.post(f"{url}/completions", json=body) as response:
        version = (await response.json())["choices"][0]["logprobs"]["prompt_version"]
    config = TeacherConfig(policy=True, context="It is $answer, not $feedback. ", top_k=3, attempts=2)
    failed = {"model": "n", "score": None, "text": "no answer within 60 s"}
    notes = {"good": [{"model": "m", "score": 0.0, "text": "too long"}, failed]}
    async with (
        counted(url) as (server, bodies),
        teachers_of(config, tokenizer=tokenizer, policy_url=server.removesuffix("/v1")) as teachers,
    ):

        async def score(version: int, **sampling: Any) -> TokenRow:
            sample = sample_of(tokenizer, "<user>hi\n<assistant>hello", version=version)
            params = SamplingParams(max_tokens=5, **sampling)
            told = RolloutSample(sequences=sample.sequences, reward=0.5, facts={"judges": notes}, sampling=params)
            return (await teachers.score({"answer": ["a", 1]}, told)).sequences[0]

        same = await score(version)
        asked = list(bodies)
        other = await score(version + 7)
        warm, truncated = await score(version, temperature=0.7), await score(version, top_p=0.9)
        sample = sample_of(tokenizer, "<user>hi\n<assistant>hello")
        lost = await teachers.score({"question": "?"}, sample)
    context = tokenizer.encode('It is ["a", 1], not too long. ')
    ids = same.token_ids.tolist()
    assert [one["prompt"] for one in asked] == [context + ids], "the sequence alone was scored when it was sampled"
    expected = dense_logprobs(model_dir, context + ids)[-6:-1]
    plain = dense_logprobs(model_dir, ids)[-6:-1]
    rows = range(5)
    assert same.teacher_logprobs is not None
    np.testing.assert_allclose(same.teacher_logprobs[-5:], expected[rows, ids[-5:]], atol=2e-3)
    gap = (expected - plain)[rows, ids[-5:]].numpy()
    for one in (other, warm, truncated):
        assert one.teacher_logprobs is not None
        np.testing.assert_allclose(one.teacher_logprobs[-5:], np.minimum(-1.0 + gap, 0.0), atol=4e-3)
    assert same.teacher_top_ids is not None
    assert same.teacher_top_ids[-5:].tolist() == expected.topk(3, dim=-1)[1].tolist()
    assert lost.invalid_cause == "the policy: the context names $answer, and the task has the fields question"


async def test_weights_that_change_while_the_policy_scores_itself_are_never_compared_with_other_weights(
    url: str, model_dir: Path, tokenizer: ModelTokenizer
) -> None:
    config = TeacherConfig(policy=True, context="It is so. ", top_k=3, attempts=2)
    (plain_row,) = sample_of(tokenizer, "<user>hi\n<assistant>hello", trained=4).sequences
    # The first half was sampled by version 3, the second by version 4.
    row = replace(plain_row, versions=np.array([*plain_row.versions[:-4], 3, 3, 4, 4], dtype=np.int32))

    async def score(*versions: int) -> RolloutSample:
        async with (
            counted(url, versions=versions) as (server, _),
            teachers_of(config, tokenizer=tokenizer, policy_url=server.removesuffix("/v1")) as teachers,
        ):
            return await teachers.score({}, RolloutSample(sequences=(row,), reward=1.0))

    # Version 3 answers first, then version 4 twice: now the tokens of version 3 are the others.
    (taught,) = (await score(3, 4, 4)).sequences
    context, ids = tokenizer.encode("It is so. "), row.token_ids.tolist()
    expected = dense_logprobs(model_dir, context + ids)[-5:-1][range(4), ids[-4:]].numpy()
    gaps = expected - dense_logprobs(model_dir, ids)[-5:-1][range(4), ids[-4:]].numpy()
    assert taught.teacher_logprobs is not None
    np.testing.assert_allclose(taught.teacher_logprobs[-4:-2], np.minimum(-1.0 + gaps[:2], 0.0), atol=4e-3)
    np.testing.assert_allclose(taught.teacher_logprobs[-2:], expected[2:], atol=2e-3)
    lost = await score(3, 4, 5, 6, 7)
    assert lost.reward is None
    assert "its weights changed between the scores with and without the context, 2 times" in str(lost.invalid_cause)


CHILD = """
import asyncio, os, signal, sys
from pathlib import Path
from rollbook.contracts.trajectory import RolloutSample
from rollbook.rollout.chat.tokenizer import ModelTokenizer
from rollbook.rollout.rewards import teacher_scores
from rollbook.rollout.rewards.config import TeacherConfig
from rollbook.rollout.rewards.teacher import open_teachers

async def main(url, model, store, ids):
    ids = [int(one) for one in ids.split(",")]
    sample = RolloutSample(ids, [0.0, *[-1.0] * (len(ids) - 1)], [0, *[1] * (len(ids) - 1)], 1.0)
    settings = TeacherConfig(url=url, model="teacher", top_k=3).settings
    async with open_teachers([settings], ModelTokenizer.from_directory(Path(model)), store=Path(store)) as teachers:
        await teachers.score({}, sample)
        os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main(*sys.argv[1:]))
"""


async def test_a_teacher_is_asked_once_for_content_even_if_the_worker_that_asked_was_killed(
    url: str, model_dir: Path, tokenizer: ModelTokenizer, tmp_path: Path
) -> None:
    store = tmp_path / "teacher_scores.db"
    sample = sample_of(tokenizer, "abcdef")
    ids = sample.sequences[0].token_ids.tolist()
    async with counted(url) as (server, bodies):
        command = [sys.executable, "-c", CHILD, server, str(model_dir), str(store), ",".join(map(str, ids))]
        killed = await asyncio.create_subprocess_exec(*command)
        assert await killed.wait() == -signal.SIGKILL
        assert len(bodies) == 1
        config = TeacherConfig(url=server, model="teacher", top_k=3)
        async with teachers_of(config, tokenizer=tokenizer, store=store) as teachers:
            found = (await teachers.score({}, sample)).sequences[0]
            assert len(bodies) == 1, "the answer to the killed process was stored"
            fresh = sample_of(tokenizer, "another text")
            await asyncio.gather(*(teachers.score({}, fresh) for _ in range(5)))
            assert len(bodies) == 2, "requests for the same content share one"
    expected = dense_logprobs(model_dir, ids)[:-1]
    assert found.teacher_top_ids is not None
    assert found.teacher_top_ids[-5:].tolist() == expected.topk(3, dim=-1)[1].tolist()
    store.write_bytes(b"this is no database" * 100)
    async with teachers_of(TeacherConfig(url=url, model="teacher"), tokenizer=tokenizer, store=store) as teachers:
        assert (await teachers.score({}, sample)).is_scorable


def test_a_worker_waits_for_another_that_opens_the_same_scores_and_never_replaces_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "teacher_scores.db"
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("CREATE TABLE scores (number INTEGER PRIMARY KEY, key TEXT UNIQUE, answer BLOB)")
    other.execute("BEGIN IMMEDIATE")
    monkeypatch.setattr(teacher_scores, "sleep", lambda _: other.execute("COMMIT"))
    store = ScoreStore(path)
    store.add("key", SequenceScores(logprobs=np.zeros(2, np.float32)))
    assert other.execute("SELECT key FROM scores").fetchall() == [("key",)]
    store.close()
    other.close()


def test_scores_that_were_damaged_anywhere_in_their_file_are_asked_for_again(tmp_path: Path) -> None:
    path = tmp_path / "teacher_scores.db"
    kept = SequenceScores(logprobs=np.zeros(500, np.float32))
    store = ScoreStore(path)
    for number in range(100):
        store.add(str(number), kept)
    store.close()
    data = bytearray(path.read_bytes())
    for at in range(8192, len(data), 4096):  # all pages but those that SQLite reads when it opens the file
        data[at : at + 64] = b"\xff" * 64
    path.write_bytes(data)
    damaged = ScoreStore(path)
    assert damaged.find("7") is None
    damaged.add("7", kept)
    damaged.close()
    store = ScoreStore(path)
    assert store.find("7") is not None
    store.close()


def test_a_teacher_needs_a_model_or_a_context_and_one_table_is_a_list_of_one() -> None:
    one = RolloutConfig.model_validate({"function": "chat", "teacher": {"url": "http://a/v1", "model": "m"}})
    assert [teacher.model for teacher in one.teacher] == ["m"]
    for given, message in (
        ({"url": "http://a/v1"}, "needs url and model, or policy = true"),
        ({"policy": True}, "needs a context"),
        ({"policy": True, "context": "c", "url": "http://a/v1"}, "remove url"),
        ({"policy": True, "context": "costs 5$"}, "write \\$\\$ for a dollar sign"),
    ):
        with pytest.raises(ValidationError, match=message):
            TeacherConfig.model_validate(given)


@pytest.mark.slow
def test_a_killed_run_with_the_policy_as_teacher_is_replayed_without_one(tmp_path: Path) -> None:
    teacher = '{policy = true, context = "$secret correct", top_k = 4, tasks = {secret = "[0-4]"}}'
    settings = [f"rollout.teacher={teacher}", "trainer.distill_coef=0.5", 'trainer.distill_kl="forward"']
    run = SmallRun(tmp_path, ["trainer.max_steps=8", "trainer.checkpoint_every=3", *settings]).start()
    try:
        run.until(lambda: run.step() >= 4, what="step 4")
        run.kill("worker")
        run.kill("trainer")
        summary = run.wait()
    finally:
        run.stop()
    assert (summary["exit_code"], summary["audit"]) == (0, "ok"), summary["stderr"]
    divergences = [
        row["train/teacher_kl"] for row in read_metrics(run.directory / "metrics.jsonl") if "train/loss" in row
    ]
    assert any(found is not None and found > 0 for found in divergences)
    replayed = rollbook("replay", str(run.directory), "--verify", "--json")
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr
