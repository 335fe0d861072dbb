"""Model directories: built from settings reproducibly and atomically, or used in place."""

from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from rollbook.contracts.errors import RunError
from rollbook.trainer.model.model_directory import prepare_model_directory
from rollbook.trainer.model.policy_model import PolicyModel
from rollbook.trainer.model_config import ModelBuildConfig, ModelConfig
from tests.parts.trainer.batches import BUILD, tiny_model_dir


def test_the_same_settings_and_seed_give_the_same_weights(tmp_path: Path) -> None:
    torch.manual_seed(5)
    state = torch.get_rng_state()
    first, second = tiny_model_dir(tmp_path / "a", seed=3), tiny_model_dir(tmp_path / "b", seed=3)
    other = tiny_model_dir(tmp_path / "c", seed=4)
    assert PolicyModel.load(first).digest() == PolicyModel.load(second).digest() != PolicyModel.load(other).digest()
    assert torch.equal(torch.get_rng_state(), state), "the caller's random state does not change"


def test_preparing_the_model_directory_is_idempotent(tmp_path: Path) -> None:
    directory = tiny_model_dir(tmp_path / "model")
    written = {path.name: path.stat().st_mtime_ns for path in directory.iterdir()}
    assert tiny_model_dir(tmp_path / "model") == directory
    assert {path.name: path.stat().st_mtime_ns for path in directory.iterdir()} == written
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_model_directory_built_with_other_settings_is_rejected(tmp_path: Path) -> None:
    tiny_model_dir(tmp_path / "model")
    other = ModelBuildConfig.model_validate({**BUILD.model_dump(), "layers": 3})
    with pytest.raises(RunError, match=r"other settings for: layers, seed"):
        tiny_model_dir(tmp_path / "model", seed=1, build=other)
    (tmp_path / "half").mkdir()
    with pytest.raises(RunError, match="Remove it to build it again"):
        tiny_model_dir(tmp_path / "half")


def test_each_word_is_one_token_and_special_tokens_come_first(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(str(tiny_model_dir(tmp_path / "model")))
    assert tokenizer.encode("<bos>0 11<eos> unknown") == [1, 4, 15, 2, 3]
    assert tokenizer.decode([4, 15]) == "0 11"
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1, 2)


def test_an_existing_model_directory_is_used_in_place(tmp_path: Path) -> None:
    existing = tiny_model_dir(tmp_path / "existing")
    assert prepare_model_directory(ModelConfig(path=str(existing)), tmp_path / "unused", seed=0) == existing
    assert not (tmp_path / "unused").exists()


def test_a_directory_without_a_model_is_reported(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(RunError, match=r"cannot load a model from .*empty"):
        PolicyModel.load(tmp_path / "empty")


def test_half_precision_models_are_trained_in_float32(tmp_path: Path) -> None:
    directory = tiny_model_dir(tmp_path / "model")
    module = PolicyModel.load(directory).module.to(torch.bfloat16)
    module.save_pretrained(str(tmp_path / "half"))  # type: ignore[operator]  # a transformers model
    weights = PolicyModel.load(tmp_path / "half").weights()
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}
