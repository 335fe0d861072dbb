"""The reported most likely tokens equal those of a plain forward, under the sampling distribution."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rollbook.contracts.policy import SamplingParams
from tests.parts.inference.engines import BYTES_PER_TOKEN, TinyModel, embedded, some_prompts
from tests.parts.inference.models import MAX_LEN, VOCAB

TIGHT_MB = (MAX_LEN + 4 * 64) * BYTES_PER_TOKEN["llama"] / 1e6


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return TinyModel(root=tmp_path_factory.mktemp("top-logprobs"))


@pytest.mark.parametrize(
    "options", [{}, {"is_captured": True, "steps_ahead": 2}, {"kv_memory_mb": TIGHT_MB, "prefix_cache_share": 0.0}]
)
async def test_top_logprobs_equal_those_of_a_plain_forward_for_any_schedule(
    tiny: TinyModel, options: dict[str, Any]
) -> None:
    prompts = some_prompts(6, 3, 30)
    samplings = [SamplingParams(max_tokens=60, seed=n, top_logprobs=k) for n, k in enumerate((0, 1, 5, 20, 3, 0))]
    async with embedded(tiny, **options) as engine:
        completions = await asyncio.gather(*map(engine.generate, prompts, samplings))
        assert (engine.parts.scheduler.preemptions > 0) is ("kv_memory_mb" in options)
    model = tiny.model(1)
    for prompt, sampling, completion in zip(prompts, samplings, completions, strict=True):
        if not sampling.top_logprobs:
            assert completion.tops is None
            continue
        assert completion.tops is not None
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([[*prompt, *completion.token_ids.tolist()]])).logits[0].float()
        expected = torch.log_softmax(logits, dim=-1)[len(prompt) - 1 : -1].topk(sampling.top_logprobs).values.numpy()
        np.testing.assert_allclose(completion.tops.logprobs, expected, atol=1e-4)
        assert completion.tops.token_ids.shape == expected.shape


async def test_truncated_tokens_have_no_logprob_and_the_temperature_is_applied(tiny: TinyModel) -> None:
    narrow = SamplingParams(max_tokens=5, top_k=3, temperature=0.5, top_logprobs=20)
    async with embedded(tiny) as engine:
        tops = (await engine.generate([1, 2, 3], narrow)).tops
    assert tops is not None
    assert (np.isinf(tops.logprobs).sum(axis=1) == 20 - 3).all()
    np.testing.assert_allclose(np.exp(tops.logprobs).sum(axis=1), 1.0, atol=1e-5)


async def test_the_scripted_engine_reports_top_logprobs(tiny: TinyModel) -> None:
    async with tiny.engine("scripted") as engine:
        completion = await engine.generate([1], SamplingParams(max_tokens=4, top_logprobs=3))
    assert completion.tops is not None
    assert completion.tops.logprobs == pytest.approx(-np.log(VOCAB))
    assert completion.tops.token_ids[:, 0].tolist() == completion.token_ids.tolist()


def test_more_than_twenty_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="top_logprobs"):
        SamplingParams(top_logprobs=21)
