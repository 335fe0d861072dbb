"""Models are read straight to their device: the tensors that transformers loads, without holding them in main memory."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rollbook.contracts.errors import RunError
from rollbook.inference.engines.embedded.model import module as engine_module
from rollbook.inference.engines.embedded.model.module import load_module
from rollbook.shared_weights import files as files_module
from rollbook.shared_weights.files import WEIGHTS, WeightFiles, load_model, unread_model
from rollbook.shared_weights.modules import load_text_model
from rollbook.trainer.checkpoints.checkpoints import Checkpoints, initial_learner
from rollbook.trainer.config import LoraSettings
from rollbook.trainer.model import loading
from rollbook.trainer.model.policy_model import PolicyModel
from rollbook.trainer.model_config import ModelBuildConfig
from tests.models.families import FAMILIES, VOCABULARY, Family, family
from tests.parts.trainer.batches import BUILD, quick, recorded_batch, tiny_model_dir
from tests.parts.trainer.memory import PeakMemory

QUICK = {"Llama 3", "Qwen2.5", "Gemma 3 (text)", "gpt-oss", "Mamba 2", "Mixtral"}
"""Rotary tables, scaled embeddings, windows, sinks, recurrent states, experts. The others are slow."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LARGE = ModelBuildConfig(hidden_size=512, layers=4, heads=8, kv_heads=4, intermediate_size=1408, tokenizer="bytes")


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    torch.set_num_threads(1)
    return tiny_model_dir(tmp_path / "model")


def tensors_of(module: Any) -> dict[str, Tensor]:
    return {**module.state_dict(), **{f"buffer {name}": buffer for name, buffer in module.named_buffers()}}


def logits_of(module: Any) -> Tensor:
    ids_BT = torch.arange(3, 27)[None] % VOCABULARY
    with torch.no_grad():
        logits: Tensor = module.eval()(input_ids=ids_BT, use_cache=False).logits
    return logits


@pytest.mark.parametrize(
    "of", [pytest.param(f, id=f.name, marks=() if f.name in QUICK else pytest.mark.slow) for f in FAMILIES]
)
@pytest.mark.filterwarnings("ignore")
def test_a_model_has_the_tensors_and_logits_of_a_load_by_transformers(of: Family, tmp_path: Path) -> None:
    of.model().save_pretrained(tmp_path)
    is_straight = unread_model(tmp_path, dtype=torch.float32) is not None
    assert is_straight or of.has_experts or of.name in ("Granite 4 hybrid", "Nemotron-H", "Jamba", "OLMo hybrid")
    for dtype in DTYPES if is_straight else DTYPES[:1]:
        ours, theirs = load_model(tmp_path, device="cpu", dtype=dtype), load_text_model(tmp_path, dtype=dtype)
        found, expected = tensors_of(ours), tensors_of(theirs)
        assert found.keys() == expected.keys()
        assert {name: t.dtype for name, t in found.items()} == {name: t.dtype for name, t in expected.items()}
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
        assert torch.equal(logits_of(ours), logits_of(theirs))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["all weights", "adapters", "reference"])
@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_training_has_the_bits_of_a_load_by_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, kind: str, dtype: str
) -> None:
    family(name).model().save_pretrained(tmp_path / "model")
    lora = LoraSettings(rank=2) if kind == "adapters" else None
    config = quick(compute_dtype=dtype, lora=lora, kl_coef=0.1 if kind == "reference" else 0.0)
    straight = initial_learner(tmp_path / "model", config)
    with monkeypatch.context() as patch:
        patch.setattr(loading, "unread_model", lambda *_, **__: None)
        whole = initial_learner(tmp_path / "model", config)
    assert straight.model.digest() == whole.model.digest()
    assert straight.model.is_packed == whole.model.is_packed
    found, expected = (
        {n: (p.dtype, p.requires_grad) for n, p in one.model.module.named_parameters()} for one in (straight, whole)
    )
    assert found == expected
    for step in (1, 2):
        assert straight.run(recorded_batch(step)).metrics == whole.run(recorded_batch(step)).metrics
        assert straight.model.digest() == whole.model.digest()


def test_trainer_reference_adapters_checkpoints_and_engine_are_not_loaded_whole(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("the model was loaded whole")

    for module in (loading, files_module):
        monkeypatch.setattr(module, "load_text_model", refuse)
    assert not hasattr(engine_module, "load_text_model")
    config = quick(kl_coef=0.1, compute_dtype="bfloat16")
    learner = initial_learner(model_dir, config)
    checkpoints = Checkpoints(tmp_path / "checkpoints", model_dir=model_dir, config=config)
    restored = checkpoints.restore(checkpoints.save(learner, weights_digest=learner.model.digest()))
    assert restored.model.digest() == learner.model.digest()
    initial_learner(model_dir, quick(lora=LoraSettings(rank=2)))
    load_module(model_dir, device="cpu", dtype="bfloat16", max_model_len=None)


def test_main_memory_holds_a_few_weights_of_a_model_that_is_read_to_another_device(tmp_path: Path) -> None:
    """The device "meta" stands for a GPU: weights are read and moved, and take no memory there."""
    directory = tiny_model_dir(tmp_path / "model", build=LARGE)
    size = (directory / WEIGHTS).stat().st_size
    assert size > 40_000_000
    load_model(tiny_model_dir(tmp_path / "tiny"), device="meta", dtype=torch.bfloat16)  # imports
    for dtype in (torch.float32, torch.bfloat16):
        with PeakMemory() as straight:
            module = load_model(directory, device="meta", dtype=dtype)
        assert {parameter.device.type for parameter in module.parameters()} == {"meta"}
        assert straight.rise < 0.2 * size, (straight.rise, size)


def test_weights_are_aligned_wherever_they_are_in_the_file(model_dir: Path) -> None:
    weights = load_file(model_dir / WEIGHTS)
    odd = {"a": torch.zeros(1, dtype=torch.uint8), **weights}
    save_file(odd, model_dir / WEIGHTS, metadata={"format": "pt"})
    module = load_model(model_dir, device="cpu", dtype=torch.float32)
    assert all(parameter.data_ptr() % 64 == 0 for parameter in module.parameters())
    assert all(torch.equal(weights[name], parameter) for name, parameter in module.named_parameters())


def changed(model_dir: Path, **weights: Tensor | None) -> Path:
    """Files with these weights added, replaced, or removed."""
    found = load_file(model_dir / WEIGHTS)
    for name, tensor in weights.items():
        found.pop(name, None)
        if tensor is not None:
            found[name] = tensor
    save_file(found, model_dir / WEIGHTS, metadata={"format": "pt"})
    return model_dir


@pytest.mark.parametrize("is_equal", [True, False])
def test_tied_weights_that_are_stored_twice_are_loaded_as_transformers_does(tmp_path: Path, is_equal: bool) -> None:
    directory = tiny_model_dir(tmp_path / "model", build=BUILD.model_copy(update={"tie_embeddings": True}))
    embedding = load_file(directory / WEIGHTS)["model.embed_tokens.weight"]
    changed(directory, **{"lm_head.weight": embedding.clone() if is_equal else embedding + 1})
    assert unread_model(directory, dtype=torch.float32) is None
    module = load_model(directory, device="cpu", dtype=torch.float32)
    assert (module.lm_head.weight is module.model.embed_tokens.weight) is is_equal


def test_a_quantised_model_and_one_without_safetensors_are_loaded_by_transformers(model_dir: Path) -> None:
    config = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
    (model_dir / "config.json").write_text(
        json.dumps({**config, "quantization_config": {"quant_method": "fp8"}}), encoding="utf-8"
    )
    assert unread_model(model_dir, dtype=torch.float32) is None
    (model_dir / WEIGHTS).unlink()
    assert WeightFiles.of(model_dir) is None


@pytest.mark.parametrize("is_missing", [True, False])
def test_missing_weights_and_weights_of_another_shape_are_refused(model_dir: Path, is_missing: bool) -> None:
    changed(model_dir, **{"model.norm.weight": None if is_missing else torch.ones(3)})
    with pytest.raises(RunError, match=r"lack 1 weights .* model\.norm\.weight|size mismatch|mismatched"):
        PolicyModel.load(model_dir, quick())


def test_a_damaged_file_is_named(model_dir: Path) -> None:
    data = (model_dir / WEIGHTS).read_bytes()
    (model_dir / WEIGHTS).write_bytes(data[: len(data) // 2])
    for load in (
        lambda: PolicyModel.load(model_dir, quick()),
        lambda: load_module(model_dir, device="cpu", dtype="float32", max_model_len=None),
    ):
        with pytest.raises(RunError, match=rf"{WEIGHTS} is damaged"):
            load()


def test_a_device_that_is_missing_is_named_before_anything_is_read(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"inference\.device is 'cuda', which this machine does not have"):
        load_module(tmp_path / "nowhere", device="cuda", dtype="float32", max_model_len=None)
