"""Adapters: the engine's logprobs equal PEFT's, the base is never changed, and unsupported adapters are refused."""

import asyncio
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from rollbook.contracts.policy import Completion, Publication, PublicationId, SamplingParams
from rollbook.contracts.weights import Adapter, WeightsError, weights_digest
from rollbook.inference.config import InferenceConfig
from rollbook.inference.engine import BASE_MODEL, Engine, UnknownAdapterError
from rollbook.inference.engines.embedded.engine import MAX_NAMED, TransformersEngine, open_engine
from rollbook.inference.engines.embedded.live_weights import LiveWeights
from rollbook.inference.engines.embedded.paged.runner import PackedRunner
from rollbook.inference.pause import OutdatedUpdateError
from rollbook.inference.weights.lora import checked_settings, low_rank_pairs, read_adapter
from rollbook.shared_weights.modules import named_weights
from rollbook.trainer.model.weights import digest_of
from tests.parts.inference.adapters import make_adapter, peft_model, published_adapter
from tests.parts.inference.engines import TinyModel
from tests.parts.inference.models import build_model, plain_logprobs
from tests.parts.trainer.batches import BUILD, tiny_model_dir

PROMPT = [3, 4, 5]
NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
SMALL: dict[str, Any] = {"max_running": 16, "forward_tokens": 64}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return TinyModel(root=tmp_path_factory.mktemp("adapters"))


async def deviation(engine: Engine, model: Any, *, count: int = 24) -> float:
    """The largest difference between the engine's logprobs and those of a plain forward of `model`."""
    completion = await engine.generate(PROMPT, SamplingParams(max_tokens=count, seed=5))
    expected = plain_logprobs(model, [*PROMPT, *completion.token_ids.tolist()], len(PROMPT))
    return float(np.abs(np.array(expected) - completion.logprobs).max())


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt2"])
@pytest.mark.parametrize(
    "settings",
    [{}, {"use_rslora": True, "rank_pattern": {"(q_proj|c_attn)": 2}, "alpha_pattern": {"(q_proj|c_attn)": 3}}],
)
async def test_logprobs_with_an_adapter_equal_those_of_pefts_forward(
    tiny: TinyModel, tmp_path: Path, kind: str, settings: dict[str, Any]
) -> None:
    model = replace(tiny, kind=kind)
    directory = make_adapter(tmp_path / "adapter", model.model_dir, **settings)
    offered, path, adapter = published_adapter(directory, 1)
    async with open_engine(InferenceConfig(), model.model_dir) as engine:
        await engine.load_weights(offered, path, adapter=adapter)
        assert await deviation(engine, peft_model(model.model_dir, directory)) < 1e-4
        assert await deviation(engine, build_model(kind, seed=0)) > 1e-2, "the base alone differs"
        assert engine.adapter == adapter
        assert await engine.weights_digest() == offered.digest


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize(("kind", "targets"), [("gpt_oss", []), ("qwen2_moe", ["shared_expert_gate"])])
async def test_an_adapter_of_a_mixture_of_experts_is_computed_next_to_it(
    tiny: TinyModel, tmp_path: Path, kind: str, targets: list[str], captured: bool
) -> None:
    model = replace(tiny, kind=kind)
    every = ["q_proj", "k_proj", "v_proj", "o_proj", *targets]
    directory = make_adapter(tmp_path / "adapter", model.model_dir, target_modules=every)
    offered, path, adapter = published_adapter(directory, 1)
    capture = (lambda operation: operation) if captured else None
    async with open_engine(InferenceConfig(**SMALL), model.model_dir, capture=capture) as engine:
        assert engine.parts.choices[0].startswith("forward: llama")
        await engine.load_weights(offered, path, adapter=adapter)
        assert await deviation(engine, peft_model(model.model_dir, directory)) < 1e-4
        assert await deviation(engine, build_model(kind, seed=0)) > 1e-2, "the base alone differs"


async def test_an_adapter_replaces_another_and_the_base_is_never_changed(tiny: TinyModel, tmp_path: Path) -> None:
    wide = make_adapter(tmp_path / "wide", tiny.model_dir, seed=1, r=12)
    narrow = make_adapter(tmp_path / "narrow", tiny.model_dir, seed=2, target_modules=["q_proj"], r=2)
    async with open_engine(InferenceConfig(), tiny.model_dir) as engine:
        module: Any = engine.parts.module
        base, in_memory = await engine.base_digest(), digest_of(module.state_dict())
        for number, directory in enumerate((narrow, wide, narrow, wide, narrow), start=1):
            offered, path, adapter = published_adapter(directory, number)
            await engine.load_weights(offered, path, adapter=adapter)
            assert await deviation(engine, peft_model(tiny.model_dir, directory)) < 1e-4
            assert await engine.weights_digest() == offered.digest
            assert (await engine.base_digest(), digest_of(module.state_dict())) == (base, in_memory)


async def test_full_weights_remove_an_adapter_and_become_the_new_base(tiny: TinyModel, tmp_path: Path) -> None:
    directory = make_adapter(tmp_path / "adapter", tiny.model_dir)
    first, path, adapter = published_adapter(directory, 1)
    async with open_engine(InferenceConfig(), tiny.model_dir) as engine:
        await engine.load_weights(first, path, adapter=adapter)
        whole, file = tiny.weights(2)
        await engine.load_weights(whole, file)
        assert engine.adapter is None
        assert await engine.base_digest() == await engine.weights_digest() == whole.digest


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_an_adapter_of_another_base_is_refused(tiny: TinyModel, tmp_path: Path, dtype: str) -> None:
    directory = make_adapter(tmp_path / "adapter", tiny.model_dir)
    offered, path, adapter = published_adapter(directory, 1)
    base = digest_of(named_weights(build_model("llama", seed=0).to(getattr(torch, dtype))))
    adapter = replace(adapter, base_dtype="F32" if dtype == "float32" else "BF16")
    async with open_engine(InferenceConfig.model_validate({"dtype": dtype}), tiny.model_dir) as engine:
        with pytest.raises(WeightsError, match="was trained on weights with digest other"):
            await engine.load_weights(offered, path, adapter=replace(adapter, base_digest="other"))
        assert engine.publication is None
        await engine.load_weights(offered, path, adapter=replace(adapter, base_digest=base))
        # The base is also known while an adapter is live.
        again = replace(offered, id=PublicationId(2))
        await engine.load_weights(again, path, adapter=replace(adapter, base_digest=base))


async def test_an_adapter_is_a_publication_like_any_other(tiny: TinyModel, tmp_path: Path) -> None:
    directory = make_adapter(tmp_path / "adapter", tiny.model_dir)
    offered, path, adapter = published_adapter(directory, 5, epoch=2)
    async with open_engine(InferenceConfig(), tiny.model_dir) as engine:
        await engine.load_weights(offered, path, adapter=adapter)
        completion = await engine.generate(PROMPT, SamplingParams(max_tokens=4))
        assert completion.versions.tolist() == [5] * 4
        for stale in (replace(offered, id=PublicationId(6), epoch=1), replace(offered, id=PublicationId(4))):
            with pytest.raises(OutdatedUpdateError):
                await engine.load_weights(stale, path, adapter=adapter)
        with pytest.raises(WeightsError, match="digest"):
            await engine.load_weights(replace(offered, id=PublicationId(6), digest="0" * 32), path, adapter=adapter)
        assert engine.publication == offered


async def test_one_wrong_bit_of_an_adapter_changes_the_digest(tiny: TinyModel, tmp_path: Path) -> None:
    offered, path, adapter = published_adapter(make_adapter(tmp_path / "adapter", tiny.model_dir), 1)
    async with open_engine(InferenceConfig(dtype="bfloat16"), tiny.model_dir) as engine:
        await engine.load_weights(offered, path, adapter=adapter)
        assert await engine.weights_digest() == offered.digest
        bank: Any = engine.parts.model.adapters

        def damage() -> None:
            factors = bank._factors["model.layers.0.self_attn.qkv"].a_LPRE
            factors.view(torch.int16)[0, 0, 0, 0] ^= 1

        await engine.thread.between_rounds(damage)
        assert await engine.weights_digest() != offered.digest
        # The same publication is then loaded again.
        await engine.load_weights(offered, path, adapter=adapter)
        assert await engine.weights_digest() == offered.digest


@pytest.mark.parametrize("rank", [3, 16, 24])
async def test_the_ranks_of_each_projection_begin_where_a_matrix_instruction_does(
    tiny: TinyModel, tmp_path: Path, rank: int
) -> None:
    """Then a sum over them is grouped as in a product of this projection alone."""
    offered, path, adapter = published_adapter(make_adapter(tmp_path / "adapter", tiny.model_dir, r=rank), 1)
    async with open_engine(InferenceConfig(), tiny.model_dir) as engine:
        await engine.load_weights(offered, path, adapter=adapter)
        bank: Any = engine.parts.model.adapters
        b_PRO = bank._factors["model.layers.0.self_attn.qkv"].b_LPRO[0]
        used = b_PRO.flatten(0, 1).any(dim=1).nonzero()[:, 0].tolist()
        width = b_PRO.shape[1]
        assert used == [part * width + n for part in range(3) for n in range(rank)]
        assert width % 16 == 0


def test_an_adapter_that_was_never_applied_is_detected_however_small_it_is() -> None:
    torch.manual_seed(0)
    weights = LiveWeights(nn.Sequential(nn.Linear(8, 6, bias=False).to(torch.bfloat16)), torch.device("cpu"))
    adapter = Adapter(name="tiny", settings={"r": 2, "lora_alpha": 4})
    tensors = {"0.lora_A.weight": torch.randn(2, 8), "0.lora_B.weight": torch.full((6, 2), 1e-6)}
    plan = weights.plan_adapter(adapter, tensors)
    published = digest_of(tensors)
    weights.apply(replace(plan, sources=[], targets=[]))
    assert weights.digest() != published
    weights.apply(plan)
    assert weights.digest() == published
    tensors["0.lora_A.weight"].zero_()
    assert weights.digest() == published, "the engine must have copied the tensors"


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"r": 2, "lora_alpha": 4, "use_dora": True}, "use_dora"),
        ({"r": 2, "lora_alpha": 4, "bias": "all"}, "bias"),
        ({"r": 2, "lora_alpha": 4, "modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"r": 2, "lora_alpha": 4, "init_lora_weights": "pissa"}, "init_lora_weights"),
        ({"r": 2, "lora_alpha": 4, "peft_type": "IA3"}, "peft_type"),
        ({"r": 0, "lora_alpha": 4}, "rank"),
        ({"lora_alpha": 4}, "r"),
        (
            {"r": 2, "lora_alpha": 4, "rank_pattern": {"(q_proj": 2}},
            r"rank_pattern: '\(q_proj' is not a regular expression",
        ),
        ({"r": 2, "lora_alpha": 4, "alpha_pattern": {"*": 2.0}}, r"alpha_pattern: '\*' is not a regular expression"),
    ],
)
def test_unsupported_settings_are_refused_by_name(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(WeightsError, match=named):
        checked_settings(settings)


def test_tensors_without_a_pair_are_refused() -> None:
    settings = checked_settings({"r": 2, "lora_alpha": 4})
    with pytest.raises(WeightsError, match="only one tensor of its pair"):
        low_rank_pairs(settings, ["base_model.model.a.lora_A.weight"])
    with pytest.raises(WeightsError, match="not lora_A"):
        low_rank_pairs(settings, ["base_model.model.a.lora_magnitude_vector"])
    with pytest.raises(WeightsError, match="no tensors"):
        low_rank_pairs(settings, [])


async def test_an_adapter_that_does_not_fit_the_model_changes_nothing(tiny: TinyModel, tmp_path: Path) -> None:
    tied = replace(tiny, kind="qwen2")
    other = make_adapter(tmp_path / "gpt2", replace(tiny, kind="gpt2").model_dir)
    async with open_engine(InferenceConfig(), tied.model_dir) as engine:
        base = await engine.weights_digest()
        offered, path, adapter = published_adapter(other, 1)
        with pytest.raises(WeightsError, match="does not have"):
            await engine.load_weights(offered, path, adapter=adapter)
        small = Adapter(name="small", settings={"r": 2, "lora_alpha": 4})
        norm = {"model.norm.lora_A.weight": torch.ones(2, 32), "model.norm.lora_B.weight": torch.ones(32, 2)}
        with pytest.raises(WeightsError, match="belong to no linear layer"):
            await engine.load_tensors(offered, norm, adapter=small)
        layer = "model.layers.0.self_attn.q_proj"
        misshapen = {f"{layer}.lora_A.weight": torch.ones(2, 32), f"{layer}.lora_B.weight": torch.ones(31, 2)}
        with pytest.raises(WeightsError, match=r"shape \(31, 2\)"):
            await engine.load_tensors(offered, misshapen, adapter=small)
        assert await engine.weights_digest() == base
        assert engine.publication is None


async def test_a_peft_directory_is_served_as_one_model(tiny: TinyModel, tmp_path: Path) -> None:
    directory = make_adapter(tmp_path / "adapter", tiny.model_dir)
    async with open_engine(InferenceConfig(), directory) as engine:
        await engine.adopt(Publication(id=PublicationId(0), epoch=0, step=0, digest=await engine.weights_digest()))
        assert any("llama" in choice for choice in engine.parts.choices)
        assert await deviation(engine, peft_model(tiny.model_dir, directory)) < 1e-4
        assert engine.adapter is not None, "the adapter is not merged"
        _, tensors = read_adapter(directory)
        assert await engine.weights_digest() == weights_digest(tensors.values())


class Ops(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """Records the names of the torch operations of this thread."""

    def __init__(self, names: set[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self.names = names

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(str(func.overloadpacket))
        return func(*args, **(kwargs or {}))


async def test_the_engine_thread_only_copies_the_factors(tiny: TinyModel, tmp_path: Path) -> None:
    offered, path, adapter = published_adapter(make_adapter(tmp_path / "adapter", tiny.model_dir), 1)
    async with open_engine(InferenceConfig(publish="adapter"), tiny.model_dir) as engine:
        weights: Any = engine.parts.weights
        plan, apply = weights.plan_adapter, weights.apply
        threads: dict[str, str] = {}
        operations: set[str] = set()

        def planned(*args: Any) -> Any:
            threads["plan"] = threading.current_thread().name
            return plan(*args)

        def applied(load_plan: Any) -> None:
            threads["apply"] = threading.current_thread().name
            with Ops(operations):
                apply(load_plan)

        weights.plan_adapter, weights.apply = planned, applied
        await engine.load_weights(offered, path, adapter=adapter)
    assert threads == {"plan": "policy-staging_0", "apply": "policy-engine"}
    assert operations == {"aten.copy_"}


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
@pytest.mark.parametrize("kind", ["llama", "qwen2"])
async def test_an_adapter_of_the_head_changes_the_head_only(tiny: TinyModel, tmp_path: Path, kind: str) -> None:
    """Also where the head shares its matrix with the embedding (qwen2): nothing is merged into that matrix."""
    model = replace(tiny, kind=kind)
    directory = make_adapter(tmp_path / "adapter", model.model_dir, target_modules=["lm_head", "up_proj"])
    offered, path, adapter = published_adapter(directory, 1)
    async with open_engine(InferenceConfig(), model.model_dir) as engine:
        await engine.load_weights(offered, path, adapter=adapter)
        assert await deviation(engine, peft_model(model.model_dir, directory)) < 1e-4


async def answers(engine: TransformersEngine, names: list[str | None], prompt: list[int]) -> list[Completion]:
    sampling = SamplingParams(max_tokens=20, seed=3)
    return await asyncio.gather(*(engine.generate(prompt, sampling, adapter=name) for name in names))


@pytest.mark.parametrize(
    ("kind", "settings", "captured"),
    [("llama", {}, False), ("llama", {}, True), ("qwen2", {"dtype": "bfloat16"}, True), ("gpt2", {}, False)],
)
async def test_requests_with_different_adapters_share_a_batch_and_get_what_each_gets_alone(
    tiny: TinyModel, tmp_path: Path, kind: str, settings: dict[str, Any], captured: bool
) -> None:
    """`captured`: the packed steps of a GPU."""
    model = replace(tiny, kind=kind)
    first, second, third = (
        make_adapter(tmp_path / f"adapter-{seed}", model.model_dir, seed=seed, r=4 * seed) for seed in (1, 2, 3)
    )
    capture = (lambda operation: operation) if captured else None
    names: list[str | None] = [None, "two", BASE_MODEL, "three"]
    prompt = [3 + at % 20 for at in range(40)]
    async with open_engine(InferenceConfig(**SMALL, **settings), model.model_dir, capture=capture) as engine:
        offered, path, adapter = published_adapter(first, 1)
        await engine.load_weights(offered, path, adapter=adapter)
        for name, directory in (("two", second), ("three", third)):
            config, tensors = read_adapter(directory)
            await engine.load_adapter(Adapter(name=name, settings=config), tensors)
        assert list(engine.named_adapters) == ["two", "three"]
        alone = [(await answers(engine, [name], prompt))[0] for name in names]
        together = await answers(engine, names * 3, prompt)
        assert engine.stats().cached_tokens > 0, "the same adapter reuses its prefix"
        tolerance = 1e-5 if "dtype" not in settings else 0.06
        for at, completion in enumerate(together):
            expected = alone[at % len(names)]
            if "dtype" not in settings:
                assert completion.token_ids.tolist() == expected.token_ids.tolist()
            same = min(5, int((completion.token_ids == expected.token_ids).cumprod().sum()))
            assert np.abs(completion.logprobs[:same] - expected.logprobs[:same]).max(initial=0.0) < tolerance
        assert len({tuple(completion.token_ids.tolist()) for completion in alone}) == 4
        if "dtype" not in settings:
            adapted = [peft_model(model.model_dir, directory) for directory in (first, second)]
            for asked, module, completion in zip(names, [*adapted, build_model(kind, seed=0)], alone, strict=False):
                tokens = [*prompt, *completion.token_ids.tolist()]
                by_peft = plain_logprobs(module, tokens, len(prompt))
                assert completion.logprobs == pytest.approx(by_peft, abs=1e-4)
                scores = await engine.score(tokens, adapter=asked)
                assert scores.logprobs[len(prompt) - 1 :] == pytest.approx(by_peft, abs=1e-4)


@pytest.mark.parametrize("captured", [False, True])
async def test_a_prefix_of_one_adapter_is_not_reused_by_another(
    tiny: TinyModel, tmp_path: Path, captured: bool
) -> None:
    directory = make_adapter(tmp_path / "adapter", tiny.model_dir)
    settings, tensors = read_adapter(directory)
    prompt = [3 + at % 20 for at in range(48)]
    capture = (lambda operation: operation) if captured else None
    async with open_engine(InferenceConfig(**SMALL), tiny.model_dir, capture=capture) as engine:
        await engine.adopt(Publication(id=PublicationId(0), epoch=0, step=0, digest=await engine.weights_digest()))
        await engine.load_adapter(Adapter(name="one", settings=settings), tensors)
        for name, is_reused in ((None, False), ("one", False), (None, True), ("one", True)):
            before = engine.stats().cached_tokens
            # One token only: the memo of next-token logits must not be shared either.
            for count in (8, 1, 1):
                completion = await engine.generate(prompt, SamplingParams(max_tokens=count, seed=count), adapter=name)
                module = peft_model(tiny.model_dir, directory) if name else build_model("llama", seed=0)
                expected = plain_logprobs(module, [*prompt, *completion.token_ids.tolist()], len(prompt))
                assert completion.logprobs == pytest.approx(expected, abs=1e-4)
                if count == 8:
                    assert (engine.stats().cached_tokens > before) is is_reused


async def test_requests_of_an_unloaded_adapter_fail_and_others_continue(tiny: TinyModel, tmp_path: Path) -> None:
    settings, tensors = read_adapter(make_adapter(tmp_path / "adapter", tiny.model_dir))
    async with open_engine(InferenceConfig(max_running=2), tiny.model_dir) as engine:
        await engine.adopt(Publication(id=PublicationId(0), epoch=0, step=0, digest=await engine.weights_digest()))
        await engine.load_adapter(Adapter(name="one", settings=settings), tensors)
        sampling = SamplingParams(max_tokens=100)
        running = [engine.submit(PROMPT, sampling, adapter=name) for name in ("one", None, "one", None)]
        await engine.remove_adapter("one")
        outcomes = await asyncio.gather(*running, return_exceptions=True)
        assert [isinstance(outcome, UnknownAdapterError) for outcome in outcomes] == [True, False, True, False]
        with pytest.raises(UnknownAdapterError, match="no adapter 'one' is loaded; loaded are: none"):
            engine.submit(PROMPT, sampling, adapter="one")
        assert await deviation(engine, build_model("llama", seed=0)) < 1e-4
        assert engine.stats().queued == 0


async def test_a_limited_number_of_named_adapters_is_loaded_and_new_weights_remove_them(
    tiny: TinyModel, tmp_path: Path
) -> None:
    settings, tensors = read_adapter(make_adapter(tmp_path / "adapter", tiny.model_dir, target_modules=["q_proj"]))
    async with open_engine(InferenceConfig(), tiny.model_dir) as engine:
        for number in range(MAX_NAMED):
            await engine.load_adapter(Adapter(name=f"a{number}", settings=settings), tensors)
        with pytest.raises(WeightsError, match="which is the limit; unload one first"):
            await engine.load_adapter(Adapter(name="more", settings=settings), tensors)
        await engine.remove_adapter("a3")
        await engine.load_adapter(Adapter(name="more", settings=settings), tensors)
        whole, file = tiny.weights(2)
        await engine.load_weights(whole, file)
        assert not engine.named_adapters
        assert await engine.weights_digest() == whole.digest


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=NEEDS_GPU)])
async def test_captured_steps_see_an_adapter_that_is_updated_in_place(tmp_path: Path, device: str) -> None:
    build = {"hidden_size": 64, "heads": 2, "kv_heads": 1, "intermediate_size": 96, "max_position_embeddings": 128}
    model_dir = tiny_model_dir(tmp_path / "model", build=BUILD.model_copy(update=build))
    adapters = [make_adapter(tmp_path / f"adapter-{seed}", model_dir, seed=seed) for seed in (1, 2)]
    modules = [peft_model(model_dir, directory) for directory in adapters]
    config = InferenceConfig(device=device, publish="adapter", kv_memory_mb=50, **SMALL)
    prompts = [[1 + (n + at) % 12 for at in range(3 + 2 * n)] for n in range(8)]

    async def deviations(engine: TransformersEngine, name: str | None, module: Any) -> list[float]:
        sampling = [SamplingParams(max_tokens=24, seed=n) for n in range(len(prompts))]
        requests = zip(prompts, sampling, strict=True)
        completions = await asyncio.gather(*(engine.generate(*request, adapter=name) for request in requests))
        found = []
        for prompt, completion in zip(prompts, completions, strict=True):
            expected = plain_logprobs(module, [*prompt, *completion.token_ids.tolist()], len(prompt))
            found.append(float(np.abs(np.array(expected) - completion.logprobs).max()))
        return found

    options: dict[str, Any] = {"capture": lambda operation: operation} if device == "cpu" else {}
    async with open_engine(config, model_dir, **options) as engine:
        assert any("captured" in choice for choice in engine.parts.choices), engine.parts.choices
        runner = engine.parts.runner
        assert isinstance(runner, PackedRunner)
        assert runner.captures == 0, "steps are captured with the first adapter"
        captures = []
        for number in range(1, 5):
            offered, path, adapter = published_adapter(adapters[number % 2], number)
            await engine.load_weights(offered, path, adapter=adapter)
            assert await engine.weights_digest() == offered.digest
            captures.append(runner.captures)
            assert max(await deviations(engine, None, modules[number % 2])) < 1e-3
        assert captures == [captures[0]] * 4, "an update in place needs no new capture"
        # Another adapter next to the policy's (the first): steps that mix them.
        settings, tensors = read_adapter(adapters[1])
        await engine.load_adapter(Adapter(name="other", settings=settings), tensors)
        base = peft_model(model_dir, adapters[0]).unload()
        mixed = await asyncio.gather(
            deviations(engine, None, modules[0]),
            deviations(engine, "other", modules[1]),
            deviations(engine, BASE_MODEL, base),
        )
        assert max(max(found) for found in mixed) < 1e-3
