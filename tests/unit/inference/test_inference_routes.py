"""The experts that the embedded engine records are those of a plain forward, however a row came to its keys: by prefill, decoding,
a cached prefix, a copy of a sibling, or a second computation after preemption. They reach a client with the completion."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from rollbook.contracts.errors import RunError
from rollbook.contracts.policy import Completion, SamplingParams
from rollbook.inference.client.client import open_policy_client
from rollbook.inference.pause import PauseMode
from rollbook.inference.server.app import build_app, serve
from tests.parts.inference.engines import TinyModel, embedded, engine_config, some_prompts, until
from tests.parts.inference.models import plain_logprobs

SETTINGS: dict[str, Any] = {"max_model_len": 128, "kv_memory_mb": 20, "prefix_cache_least": 8, "record_routes": True}
MODULE: dict[str, Any] = {"forward": "module"}
CASES: list[Any] = [
    pytest.param("qwen3_moe", {}, id="slots"),
    pytest.param("gpt_oss", {}, id="slots with windows"),
    pytest.param("qwen3_next", {}, id="slots with recurrent states"),
    pytest.param("qwen3_moe", {"is_captured": True}, id="blocks"),
    pytest.param("gpt_oss", {"is_captured": True}, id="blocks with windows"),
    pytest.param("qwen3_moe", MODULE, id="slots of a module"),
    pytest.param("gpt_oss", MODULE, id="states of a module"),
    pytest.param("qwen3_moe", MODULE | {"is_captured": True}, id="captured slots of a module"),
    pytest.param("gpt_oss", MODULE | {"is_captured": True}, id="captured states of a module"),
]
BYTES_PER_TOKEN = 2 * 2 * 2 * 8 * 4 + 2 * 2
"""Of the mixture: keys and values of two layers in float32, and two choices in each."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("routes")


def plain_routes(tiny: TinyModel, tokens: list[int], *, weights: int = 1) -> NDArray[Any]:
    model, chosen = tiny.model(weights), []
    for part in model.modules():
        if type(part).__name__.endswith("Experts"):
            part.register_forward_pre_hook(lambda _module, args: chosen.append(args[1]))
    with torch.no_grad():
        model(input_ids=torch.tensor([tokens]), use_cache=False)
    return torch.stack([index.sort(dim=-1).values for index in chosen], dim=1).numpy()


def assert_routed(tiny: TinyModel, prompt: list[int], completion: Completion) -> None:
    tokens = [*prompt, *completion.token_ids.tolist()][:-1]
    assert completion.routes is not None
    np.testing.assert_array_equal(completion.routes, plain_routes(tiny, tokens))


@pytest.mark.parametrize(("kind", "settings"), CASES)
async def test_routes_are_those_of_a_plain_forward_with_prefixes_siblings_and_rows_that_move(
    root: Path, kind: str, settings: dict[str, Any]
) -> None:
    tiny = TinyModel(root=root, kind=kind)
    prompts = [*some_prompts(8, 1, 40), *[some_prompts(1, 20, 20)[0]] * 3]
    lengths = [(1, 2, 5, 24)[number % 4] for number in range(len(prompts))]
    async with embedded(tiny, max_running=5, **SETTINGS, **settings) as engine:
        assert engine.parts.choices[0].startswith(
            "forward: Hugging Face" if "forward" in settings else "forward: llama"
        )
        await engine.pause(PauseMode.KEEP)
        futures = [
            engine.submit(p, SamplingParams(max_tokens=n, stop_token_ids=(3,), seed=n))
            for p, n in zip(prompts, lengths, strict=True)
        ]
        await engine.resume()
        completions = await asyncio.gather(*futures)
        turns = [[*p, *c.token_ids.tolist(), 9, 8, 7] for p, c in zip(prompts, completions, strict=True)]
        continued = await asyncio.gather(*(engine.generate(turn, SamplingParams(max_tokens=9)) for turn in turns))
        assert engine.stats().cached_tokens > 50
    for prompt, completion in [*zip(prompts, completions, strict=True), *zip(turns, continued, strict=True)]:
        assert_routed(tiny, prompt, completion)
        tokens = [*prompt, *completion.token_ids.tolist()]
        np.testing.assert_allclose(
            completion.logprobs, plain_logprobs(tiny.model(1), tokens, len(prompt)), rtol=1e-4, atol=1e-4
        )


@pytest.mark.parametrize("is_captured", [False, True], ids=["slots", "blocks"])
async def test_a_preempted_request_has_the_routes_of_all_its_tokens(root: Path, is_captured: bool) -> None:
    tiny = TinyModel(root=root, kind="qwen3_moe")
    prompts = some_prompts(8, 10, 40)
    # Two rows of the full length: one is the scratch row.
    limits = {"kv_memory_mb": 3 * 128 * BYTES_PER_TOKEN / 1e6, "prefix_cache_share": 0.0}
    async with embedded(tiny, max_running=8, is_captured=is_captured, **SETTINGS | limits) as engine:
        completions = await asyncio.gather(*(engine.generate(p, SamplingParams(max_tokens=60)) for p in prompts))
        assert engine.parts.scheduler.preemptions > 0
    for prompt, completion in zip(prompts, completions, strict=True):
        assert_routed(tiny, prompt, completion)


@pytest.mark.parametrize("is_captured", [False, True], ids=["slots", "blocks"])
async def test_after_recompute_the_routes_are_those_of_the_new_weights(root: Path, is_captured: bool) -> None:
    tiny = TinyModel(root=root, kind="qwen3_moe")
    prompt = some_prompts(1, 20, 20)[0]
    async with embedded(tiny, kv_after_update="recompute", is_captured=is_captured, **SETTINGS) as engine:
        future = engine.submit(prompt, SamplingParams(max_tokens=50))
        await until(lambda: engine.stats().tokens > 5)
        await engine.pause(PauseMode.KEEP)
        await engine.load_weights(*tiny.weights(2))
        await engine.resume()
        completion = await future
    assert 0 < int((completion.versions == 1).sum()) < 50
    tokens = [*prompt, *completion.token_ids.tolist()][:-1]
    assert completion.routes is not None
    np.testing.assert_array_equal(completion.routes, plain_routes(tiny, tokens, weights=2))
    assert not np.array_equal(completion.routes, plain_routes(tiny, tokens))


async def test_routes_reach_a_client_whether_or_not_it_reads_the_tokens_as_they_are_sampled(root: Path) -> None:
    tiny = TinyModel(root=root, kind="qwen3_moe")
    prompt = some_prompts(1, 20, 20)[0]
    config = engine_config("transformers", **SETTINGS)
    async with (
        tiny.engine("transformers", **SETTINGS) as engine,
        serve(build_app(engine, config)) as url,
        open_policy_client(url, request_s=20) as client,
    ):
        whole = await client.complete(prompt, SamplingParams(max_tokens=12))
        streamed = await client.complete(prompt, SamplingParams(max_tokens=12), on_tokens=lambda _chunk: None)
    for completion in (whole, streamed):
        assert_routed(tiny, prompt, completion)


async def test_a_model_without_experts_is_refused_by_its_type(root: Path) -> None:
    with pytest.raises(RunError, match=r"'llama' has no experts whose choices can be recorded.*router_replay"):
        async with embedded(TinyModel(root=root), **SETTINGS):
            pass
