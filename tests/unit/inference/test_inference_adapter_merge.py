"""Adapters: the engine's logprobs equal PEFT's, the base is restored exactly, and unsupported adapters are refused."""

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from rollbook.contracts.policy import Publication, PublicationId, SamplingParams
from rollbook.contracts.weights import Adapter, WeightsError, weights_digest
from rollbook.inference.config import InferenceConfig
from rollbook.inference.engine import Engine
from rollbook.inference.engines.embedded.engine import open_engine
from rollbook.inference.engines.embedded.live_weights import LiveWeights
from rollbook.inference.pause import OutdatedUpdateError
from rollbook.inference.weights.lora import checked_settings, low_rank_pairs, read_adapter
from rollbook.trainer.model.policy_model import PolicyModel
from rollbook.trainer.model.weights import digest_of, named_weights
from tests.parts.inference.adapters import make_adapter, peft_model, published_adapter
from tests.parts.inference.engines import TinyModel
from tests.parts.inference.models import build_model, plain_logprobs

PROMPT = [3, 4, 5]


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


async def test_an_adapter_replaces_another_and_the_base_is_restored_bit_for_bit(
    tiny: TinyModel, tmp_path: Path
) -> None:
    wide = make_adapter(tmp_path / "wide", tiny.model_dir, seed=1)
    narrow = make_adapter(tmp_path / "narrow", tiny.model_dir, seed=2, target_modules=["q_proj"], r=2)
    async with open_engine(InferenceConfig(), tiny.model_dir) as engine:
        base = await engine.weights_digest()
        for number, directory in enumerate((wide, narrow, wide, narrow), start=1):
            offered, path, adapter = published_adapter(directory, number)
            await engine.load_weights(offered, path, adapter=adapter)
            assert await deviation(engine, peft_model(tiny.model_dir, directory)) < 1e-4
            assert await engine.base_digest() == base
        await engine.unload_adapter(replace(offered, id=PublicationId(9), digest=base))
        assert engine.adapter is None
        assert await engine.weights_digest() == base


async def test_full_weights_remove_an_adapter_and_become_the_new_base(tiny: TinyModel, tmp_path: Path) -> None:
    directory = make_adapter(tmp_path / "adapter", tiny.model_dir)
    first, path, adapter = published_adapter(directory, 1)
    async with open_engine(InferenceConfig(), tiny.model_dir) as engine:
        await engine.load_weights(first, path, adapter=adapter)
        whole, file = tiny.weights(2)
        await engine.load_weights(whole, file)
        assert engine.adapter is None
        assert await engine.base_digest() == await engine.weights_digest() == whole.digest


async def test_an_adapter_of_another_base_is_refused(tiny: TinyModel, tmp_path: Path) -> None:
    directory = make_adapter(tmp_path / "adapter", tiny.model_dir)
    offered, path, adapter = published_adapter(directory, 1)
    base = digest_of(named_weights(build_model("llama", seed=0)))
    async with open_engine(InferenceConfig(), tiny.model_dir) as engine:
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


async def test_a_damaged_matrix_changes_the_digest(tiny: TinyModel, tmp_path: Path) -> None:
    offered, path, adapter = published_adapter(make_adapter(tmp_path / "adapter", tiny.model_dir), 1)
    async with open_engine(InferenceConfig(), tiny.model_dir) as engine:
        await engine.load_weights(offered, path, adapter=adapter)
        weights: Any = engine.parts.weights

        def damage() -> None:
            weights._targets["model.layers.0.self_attn.q_proj.weight"][0, 0] += 0.5

        await engine.thread.between_rounds(damage)
        assert await engine.weights_digest() != offered.digest


def test_an_adapter_of_a_bfloat16_model_is_merged_in_float32_and_rounded_once() -> None:
    torch.manual_seed(0)
    linear = nn.Linear(8, 6, bias=False).to(torch.bfloat16)
    module = nn.Sequential(linear)
    base = linear.weight.detach().clone()
    a, b = torch.randn(2, 8), torch.randn(6, 2)
    weights = LiveWeights(module, torch.device("cpu"))
    adapter = Adapter(name="tiny", settings={"r": 2, "lora_alpha": 4})
    weights.apply(weights.plan_adapter(adapter, {"0.lora_A.weight": a, "0.lora_B.weight": b}))
    assert torch.equal(linear.weight, (base.float() + (b @ a) * 2.0).to(torch.bfloat16))
    before = weights_digest(weights.adapter_snapshot() or [])
    a.zero_()
    assert weights_digest(weights.adapter_snapshot() or []) == before, "the engine must have copied the tensors"


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
        small = Adapter(name="head", settings={"r": 2, "lora_alpha": 4})
        head = {"lm_head.lora_A.weight": torch.ones(2, 32), "lm_head.lora_B.weight": torch.ones(32, 2)}
        with pytest.raises(WeightsError, match="shares its memory"):
            await engine.load_tensors(offered, head, adapter=small)
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
        # The trainer loads the same weights.
        assert await engine.weights_digest() == PolicyModel.load(directory).digest()


class Ops(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """Records the names of the torch operations of this thread."""

    def __init__(self, names: set[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self.names = names

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(str(func.overloadpacket))
        return func(*args, **(kwargs or {}))


async def test_the_engine_thread_only_copies_the_merged_matrices(tiny: TinyModel, tmp_path: Path) -> None:
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


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_merging_by_groups_equals_merging_one_by_one(tiny: TinyModel, tmp_path: Path, kind: str) -> None:
    model = replace(tiny, kind=kind)
    directory = make_adapter(tmp_path / "adapter", model.model_dir, rank_pattern={"(q_proj|c_attn)": 2})
    settings, tensors = read_adapter(directory)
    weights = LiveWeights(build_model(kind, seed=0), torch.device("cpu"))
    merge = weights.plan_adapter(Adapter(name="a", settings=settings), tensors).merge
    assert merge is not None
    one_by_one, by_groups = merge.merged_one_by_one(), merge.merged_by_groups()
    assert one_by_one.keys() == by_groups.keys()
    for name, matrix in one_by_one.items():
        torch.testing.assert_close(by_groups[name], matrix, rtol=0, atol=1e-6)
