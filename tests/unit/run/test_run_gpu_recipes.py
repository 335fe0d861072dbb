"""The run files in docs/gpu.md are valid and fit on the cards that their headings name."""

import re
from pathlib import Path

import pytest

from rollbook.run.config.run import load_config
from rollbook.run.resources import automatic
from rollbook.run.resources.automatic import Resolution, resolve
from rollbook.run.resources.machine import GB, Gpu, Machine
from rollbook.run.resources.model_facts import ModelFacts, facts_of

PAGE = Path(__file__).parents[3] / "docs" / "gpu.md"
COUNTS = {"One": 1, "Two": 2, "Eight": 8}
# hidden, layers, heads, key heads, head width, feed-forward width, tied
SHAPES = {
    "Qwen/Qwen2.5-0.5B-Instruct": (896, 24, 14, 2, 64, 4864, True),
    "Qwen/Qwen2.5-1.5B-Instruct": (1536, 28, 12, 2, 128, 8960, True),
    "Qwen/Qwen2.5-3B-Instruct": (2048, 36, 16, 2, 128, 11_008, True),
    "Qwen/Qwen3-4B": (2560, 36, 32, 8, 128, 9728, True),
    "Qwen/Qwen3-8B": (4096, 36, 32, 8, 128, 12_288, False),
}


def recipes() -> list[tuple[str, str]]:
    """Heading and run file of each recipe."""
    text = PAGE.read_text(encoding="utf-8").partition("\n## Recipes\n")[2]
    return re.findall(r"^### (.+?)\n.*?^```toml\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def facts(name: str) -> ModelFacts:
    hidden, layers, heads, kv_heads, head, width, is_tied = SHAPES[name]
    found = facts_of(
        {
            "hidden_size": hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": head,
            "intermediate_size": width,
            "vocab_size": 151_936,
            "max_position_embeddings": 32_768,
            "tie_word_embeddings": is_tied,
        },
        None,
    )
    assert found is not None
    return found


def resolved(directory: Path, monkeypatch: pytest.MonkeyPatch, text: str, machine: Machine) -> Resolution:
    (directory / "questions.jsonl").write_text('{"id": "a", "question": "1 + 1?", "answer": 2}\n', encoding="utf-8")
    (directory / "rewards.py").write_text("def correct(case): return 1.0\n", encoding="utf-8")
    (directory / "run.toml").write_text(text.replace("/opt/vllm/bin/python", "python3"), encoding="utf-8")
    monkeypatch.setattr(automatic, "model_facts", lambda config, *_, **__: facts(config.path))
    return resolve(load_config(directory / "run.toml"), machine)


def test_there_is_a_recipe_for_each_card_that_users_have() -> None:
    assert len(recipes()) == 6


@pytest.mark.parametrize(("heading", "text"), recipes(), ids=[heading for heading, _ in recipes()])
def test_a_recipe_is_valid_and_fits_on_its_card(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, heading: str, text: str
) -> None:
    count, size_gb = COUNTS[heading.split(maxsplit=1)[0]], int(re.findall(r"of (\d+) GB", heading)[0])
    gpus = tuple(Gpu(number=number, name="card", memory_bytes=size_gb * GB) for number in range(count))
    machine = Machine(gpus=gpus, cores=8 * count, memory_bytes=64 * count * GB)
    found = resolved(tmp_path, monkeypatch, text, machine)
    assert found.faults() == []
    assert found.plan is not None
    assert all(found.plan.total(f"GPU {number}") > 0 for number in range(count))
    assert found.notes == () or "not used" not in "\n".join(found.notes)
    config = found.loaded.config
    assert (config.trainer.lora is not None) == ("LoRA" in heading)
    assert (config.inference.engine == "vllm") == ("vLLM" in heading)
    assert (config.trainer.compute_dtype, config.inference.dtype) == ("bfloat16", "bfloat16")
    # Room for a batch of decoding requests, not for one sequence only.
    if isinstance(cache_mb := config.inference.kv_memory_mb, float):
        assert cache_mb > 500


@pytest.mark.parametrize(("is_shared", "limit_gb"), [("true", 28), ("false", 45)])
def test_low_rank_training_of_8b_needs_one_base_or_two_and_little_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_shared: str, limit_gb: int
) -> None:
    (text,) = [text for heading, text in recipes() if "8B with LoRA" in heading]
    text = text.replace("[run]\n", f"[resources]\nshared_base = {is_shared}\n\n[run]\ngpu_memory_gb = {limit_gb}\n")
    machine = Machine(gpus=(Gpu(number=0, name="card", memory_bytes=80 * GB),), cores=8, memory_bytes=64 * GB)
    found = resolved(tmp_path, monkeypatch, text, machine)
    assert found.faults() == []
    assert found.plan is not None
    assert ("base" in found.plan.by_process("GPU 0")) == (is_shared == "true")
    cache = sum(part.num_bytes for part in found.plan.parts if part.what == "keys and values")
    assert 0 < cache < found.plan.total("GPU 0") <= limit_gb * GB
