"""A look at a model directory without loading it."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from rollbook.commands.servers.policy import model_directory
from rollbook.contracts.errors import RunError
from rollbook.inference.config import InferenceConfig
from rollbook.rollout.chat.tokenizer import ModelTokenizer
from rollbook.run.preflight.model_files import built_tokenizer, context_length, model_faults
from rollbook.trainer.model.model_directory import build_tokenizer, prepare_model_directory
from rollbook.trainer.model_config import ModelBuildConfig, ModelConfig

BUILDS = (
    ModelBuildConfig(vocabulary=("heads", "tails")),
    ModelBuildConfig(tokenizer="bytes", chat_template="{% for m in messages %}{{ m.content }}{% endfor %}"),
)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({"max_position_embeddings": 64}))
    (directory / "tokenizer.json").write_text("{}")
    save_file({"a": np.zeros((4, 4), dtype=np.float32)}, directory / "model.safetensors")
    return directory


def faults(directory: Path, path: str = "model") -> list[str]:
    return list(model_faults(ModelConfig(path=path), directory.parent))


def test_a_complete_directory_has_no_faults_and_a_context_length(model: Path) -> None:
    assert faults(model) == []
    assert context_length(ModelConfig(path="model"), model.parent) == 64


def test_missing_and_damaged_files_are_named(model: Path) -> None:
    weights = (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(weights[:-1])
    (model / "tokenizer.json").unlink()
    (model / "config.json").write_text("{")
    found = "\n".join(faults(model))
    assert "config.json is not JSON" in found
    assert "has no tokenizer.json" in found
    assert "model.safetensors is incomplete" in found
    (model / "model.safetensors").unlink()
    assert any("has no weights" in fault for fault in faults(model))
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "model-1.safetensors"}}))
    assert any("lacks 1 of 1 weight files: model-1.safetensors" in fault for fault in faults(model))


def test_a_missing_directory_suggests_a_similar_one(model: Path) -> None:
    (fault,) = faults(model, "./modle")
    assert "there is no directory" in fault
    assert "did you mean 'model'?" in fault


def test_the_directory_of_a_run_is_refused_with_the_path_of_its_newest_model(model: Path) -> None:
    run = model.parent / "run"
    for step in ("step-000002", "step-000010"):
        shutil.copytree(model, run / "checkpoints" / step / "model")
    shutil.copytree(model, run / "model")
    newest = run / "checkpoints" / "step-000010"
    for path in (run, newest):
        (fault,) = faults(path, str(path))
        assert fault == f"{path} is no model, but contains one: use {newest / 'model'}"
        with pytest.raises(RunError, match=f"model.path: .*use {newest / 'model'}"):
            prepare_model_directory(ModelConfig(path=str(path)), path / "unused", seed=0)
        with pytest.raises(RunError, match=f"--model: .*use {newest / 'model'}"):
            model_directory(str(path), InferenceConfig())
    (fault,) = faults(run, str(model.parent))
    assert fault == f"{model.parent} is no model, but contains one: use {model}"
    (fault,) = faults(run, str(run / "checkpoints"))
    assert "has no config.json; a model directory has" in fault


@pytest.mark.parametrize("build", BUILDS, ids=lambda build: build.tokenizer)
def test_the_tokenizer_of_a_built_model_is_that_of_its_directory(build: ModelBuildConfig, tmp_path: Path) -> None:
    build_tokenizer(build).save_pretrained(str(tmp_path))
    saved, quick = ModelTokenizer.from_directory(tmp_path), built_tokenizer(build)
    assert (quick.eos_token_ids, quick.vocab_size) == (saved.eos_token_ids, saved.vocab_size)

    @given(st.text("ab <eos>headstil é\n", max_size=20) | st.text(max_size=20))
    def encodes_equally(text: str) -> None:
        assert quick.encode(text) == saved.encode(text)
        assert quick.decode(quick.encode(text)) == saved.decode(saved.encode(text))

    encodes_equally()
