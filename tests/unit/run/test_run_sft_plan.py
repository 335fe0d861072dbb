"""What a file of `rollbook sft` leaves open is chosen from the machine and the model, and kept by a resumed training."""

import re
from pathlib import Path

from rollbook.run.config.run import load_config
from rollbook.run.config.sft import load_sft_config
from rollbook.run.resources.machine import GB, Gpu, Machine
from rollbook.run.resources.sft_plan import resolve_sft
from rollbook.trainer.config import TrainerConfig
from tests.parts.run.projects import project

WITH_GPU = Machine(gpus=(Gpu(number=0, name="NVIDIA H200", memory_bytes=150 * GB),), cores=16, memory_bytes=128 * GB)
WITHOUT_GPU = Machine(cores=16, memory_bytes=128 * GB)


def sft_file(tmp_path: Path, shape: str) -> Path:
    """The file of a supervised fine-tuning of the model of a project."""
    model = load_config(project(tmp_path, shape)).config.model.path
    (tmp_path / "chats.jsonl").write_text("{}\n", encoding="utf-8")
    text = f'[model]\npath = "{model}"\n[sft]\ndata = "chats.jsonl"\n[trainer]\nthreads = 2\ndevice = "auto"\n'
    (tmp_path / "sft.toml").write_text(text, encoding="utf-8")
    return tmp_path / "sft.toml"


def test_supervised_fine_tuning_uses_the_gpu_unless_its_file_says_otherwise(tmp_path: Path) -> None:
    file = sft_file(tmp_path, "1.5b")
    loaded = load_sft_config(file)
    found = resolve_sft(loaded, WITH_GPU)
    assert found.faults() == []
    table = found.loaded.table["trainer"]
    assert (table["threads"], table["device"], table["compute_dtype"]) == (2, "cuda", "bfloat16")
    assert table["max_tokens_per_microbatch"] > 8192
    assert "trainer.threads" not in found.chosen
    assert resolve_sft(loaded, WITHOUT_GPU).loaded.config == loaded.config
    on_cpu = load_sft_config(file, ["trainer.device=cpu"])
    assert resolve_sft(on_cpu, WITH_GPU).chosen == {}
    recorded = {"device": "cpu", "max_tokens_per_microbatch": 300, "gradient_checkpointing": True}
    resumed = resolve_sft(loaded, WITH_GPU, recorded=TrainerConfig.model_validate({**recorded, "threads": 1}))
    assert resumed.chosen == {f"trainer.{name}": value for name, value in recorded.items()}, "a resumed one keeps them"


def test_supervised_fine_tuning_has_a_memory_plan(tmp_path: Path) -> None:
    file = sft_file(tmp_path, "1.5b")
    limited = resolve_sft(load_sft_config(file, ["run.gpu_memory_gb=40"]), WITH_GPU)
    assert limited.plan is not None
    assert limited.plan.total("GPU 0") <= 40 * GB
    assert limited.faults() == []
    assert 30 < (limited.loaded.config.trainer.gpu_memory_gb or 0) < 40
    assert re.fullmatch(r"GPU 0: .* planned \d\d\.\d of 38\.4: trainer .*", limited.lines()[1])
    (fault,) = resolve_sft(load_sft_config(file, ["run.gpu_memory_gb=20"]), WITH_GPU).faults()
    assert "are missing" in fault.message
    assert "trainer.lora.rank = 16 saves" in fault.message
    assert "rollout" not in fault.message, "settings that its file does not have"
    adapters = resolve_sft(load_sft_config(file, ["run.gpu_memory_gb=20", "trainer.lora.rank=16"]), WITH_GPU)
    assert adapters.faults() == []
