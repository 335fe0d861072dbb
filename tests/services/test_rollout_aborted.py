"""A request that the policy server aborts is continued over HTTP, with new weights in between."""

import asyncio
from pathlib import Path

import numpy as np

from rollbook.contracts.policy import FinishReason, SamplingParams
from rollbook.inference.client.client import open_policy_client
from rollbook.inference.config import InferenceConfig, ScriptedConfig
from rollbook.inference.engine import open_engine
from rollbook.inference.server.app import build_app, serve
from rollbook.inference.weights.client import WeightTransferClient
from rollbook.rollout.policy import EpisodePolicy
from tests.parts.inference.engines import TinyModel, until

MAX_TOKENS = 60


async def test_an_abort_loses_no_token_and_each_token_keeps_its_version(tmp_path: Path) -> None:
    config = InferenceConfig(engine="scripted", scripted=ScriptedConfig(token_s=0.01, max_model_len=4096))
    tiny = TinyModel(root=tmp_path)
    async with (
        open_engine(config, None) as engine,
        serve(build_app(engine, config)) as url,
        open_policy_client(url, request_s=60.0) as client,
        WeightTransferClient([url], request_s=30.0) as control,
    ):
        await engine.load_weights(*tiny.weights(1))
        policy = EpisodePolicy(client, SamplingParams(max_tokens=MAX_TOKENS))
        request = asyncio.create_task(policy.complete([1, 2, 3]))
        await until(lambda: engine.stats().tokens >= 10)
        await control.pause("abort")
        await engine.load_weights(*tiny.weights(2))
        await asyncio.sleep(0.2)
        await control.resume()
        sampled = await request
    assert (len(sampled.token_ids), sampled.finish_reason) == (MAX_TOKENS, FinishReason.LENGTH)
    assert policy.continued >= 1
    versions = sampled.versions.tolist()
    assert set(versions) == {1, 2}
    assert versions == sorted(versions), "tokens of the old weights come first"
    assert versions.count(1) >= 10
    assert np.isfinite(sampled.logprobs).all()
