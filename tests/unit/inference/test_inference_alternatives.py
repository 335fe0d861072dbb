"""The likeliest tokens beside each sampled one are those of a plain forward, in the distribution that was sampled from."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rollbook.contracts.policy import SamplingParams
from tests.parts.inference.engines import TinyModel
from tests.parts.inference.models import MAX_LEN, VOCAB
from tests.unit.inference.test_inference_stepping import BYTES_A_TOKEN, embedded, some_prompts

TIGHT_MB = (MAX_LEN + 4 * 64) * BYTES_A_TOKEN["llama"] / 1e6


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return TinyModel(root=tmp_path_factory.mktemp("alternatives"))


@pytest.mark.parametrize(
    "way", [{}, {"is_captured": True, "steps_ahead": 2}, {"kv_memory_mb": TIGHT_MB, "prefix_cache_share": 0.0}]
)
async def test_alternatives_are_the_models_own_whatever_happens_between_two_steps(
    tiny: TinyModel, way: dict[str, Any]
) -> None:
    prompts = some_prompts(6, 3, 30)
    asked = [SamplingParams(max_tokens=60, seed=n, top_logprobs=k) for n, k in enumerate((0, 1, 5, 20, 3, 0))]
    async with embedded(tiny, **way) as engine:
        answers = await asyncio.gather(*map(engine.generate, prompts, asked))
        assert (engine.parts.scheduler.preemptions > 0) is ("kv_memory_mb" in way)
    model = tiny.model(1)
    for prompt, sampling, answer in zip(prompts, asked, answers, strict=True):
        if not sampling.top_logprobs:
            assert answer.tops is None
            continue
        assert answer.tops is not None
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([[*prompt, *answer.token_ids.tolist()]])).logits[0].float()
        expected = torch.log_softmax(logits, dim=-1)[len(prompt) - 1 : -1].topk(sampling.top_logprobs).values.numpy()
        np.testing.assert_allclose(answer.tops.logprobs, expected, atol=1e-4)
        assert answer.tops.token_ids.shape == expected.shape


async def test_what_truncation_left_out_has_no_logprob_and_temperature_counts(tiny: TinyModel) -> None:
    narrow = SamplingParams(max_tokens=5, top_k=3, temperature=0.5, top_logprobs=20)
    async with embedded(tiny) as engine:
        tops = (await engine.generate([1, 2, 3], narrow)).tops
    assert tops is not None
    assert (np.isinf(tops.logprobs).sum(axis=1) == 20 - 3).all()
    np.testing.assert_allclose(np.exp(tops.logprobs).sum(axis=1), 1.0, atol=1e-5)


async def test_the_scripted_engine_tells_them_too(tiny: TinyModel) -> None:
    async with tiny.engine("scripted") as engine:
        answer = await engine.generate([1], SamplingParams(max_tokens=4, top_logprobs=3))
    assert answer.tops is not None
    assert answer.tops.logprobs == pytest.approx(-np.log(VOCAB))
    assert answer.tops.token_ids[:, 0].tolist() == answer.token_ids.tolist()


def test_more_than_twenty_are_not_told(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="top_logprobs"):
        SamplingParams(top_logprobs=21)
