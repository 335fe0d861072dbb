"""A teacher behind a real policy server scores the tokens that a policy sampled."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from rollbook.contracts.errors import RunError
from rollbook.contracts.trajectory import RolloutSample
from rollbook.rollout.chat.tokenizer import ModelTokenizer
from rollbook.rollout.config import TeacherConfig
from rollbook.rollout.rewards.teacher import open_teacher
from rollbook.trainer.checkpoints.checkpoints import initial_learner
from tests.parts.inference.chat_model import chat_model
from tests.parts.trainer.batches import one_pass, quick, tiny_model_dir
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


async def test_the_scores_of_a_teacher_are_its_logprobs_and_a_failing_one_makes_the_sample_unscorable(
    url: str, model_dir: Path
) -> None:
    tokenizer = ModelTokenizer.from_directory(model_dir)
    ids = tokenizer.encode("<user>hi\n<assistant>hello")
    mask = [0] * (len(ids) - 5) + [1] * 5
    sample = RolloutSample(ids, np.where(mask, -1.0, 0.0), mask, 1.0)
    config = TeacherConfig(url=url, model="teacher")
    async with open_teacher(config.settings, tokenizer) as teacher:
        scored = await teacher.score(sample)
    found = scored.sequences[0].teacher_logprobs
    assert found is not None
    assert np.isnan(found[:-5]).all(), "only tokens of the policy are compared"
    torch.set_num_threads(1)
    learner = initial_learner(model_dir, quick())
    expected = learner.model.token_logprobs(one_pass([ids[:-1]], range(len(ids) - 6, len(ids) - 1), ids[-5:]))[0]
    np.testing.assert_allclose(found[-5:], expected.detach().numpy(), atol=2e-3)
    gone = TeacherConfig(url="http://127.0.0.1:9/v1", model="teacher", attempts=2, first_wait_s=0.01)
    async with open_teacher(config.settings, tokenizer) as teacher:
        teacher._settings = gone.settings
        lost = await teacher.score(sample)
    assert lost.reward is None
    assert lost.invalid_cause is not None
    assert lost.invalid_cause.startswith("teacher teacher at http://127.0.0.1:9/v1: ClientConnectorError")


async def test_a_teacher_with_other_token_ids_or_without_scores_is_refused(url: str, tmp_path: Path) -> None:
    other = ModelTokenizer.from_directory(tiny_model_dir(tmp_path / "words"))
    with pytest.raises(RunError, match=r"has another tokenizer than the policy: token 0 of a text"):
        async with open_teacher(TeacherConfig(url=url, model="teacher").settings, other):
            pass
    nowhere = TeacherConfig(url="http://127.0.0.1:9/v1", model="teacher", attempts=1)
    with pytest.raises(RunError, match="does not score prompts"):
        async with open_teacher(nowhere.settings, other):
            pass
