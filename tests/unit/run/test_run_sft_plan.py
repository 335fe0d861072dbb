"""What a file of `rollbook sft` leaves open is chosen from the machine and the model, and kept by a resumed training."""

import json
import re
from pathlib import Path

import pytest

from rollbook.commands.checks.doctor import print_plan
from rollbook.run.config.run import load_config, load_resolved_config
from rollbook.run.config.sft import load_sft_config
from rollbook.run.directory import RunDirectory, RunDirectoryError
from rollbook.run.resources.machine import GB, Gpu, Machine, this_machine
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


def test_a_device_or_ranks_that_this_machine_does_not_have_are_named(tmp_path: Path) -> None:
    file = sft_file(tmp_path, "1.5b")
    loaded = load_sft_config(file, ["trainer.device=cuda"])
    (fault,) = resolve_sft(loaded, WITHOUT_GPU).faults()
    assert str(fault) == "trainer.device: is 'cuda', but this machine has no NVIDIA GPU. Use 'cpu', or 'auto'."
    recorded = TrainerConfig.model_validate({"device": "cuda", "max_steps": 1})
    (fault,) = resolve_sft(load_sft_config(file), WITHOUT_GPU, recorded=recorded).faults()
    assert "resume it on one" in fault.message
    (fault,) = resolve_sft(load_sft_config(file, ["trainer.ranks=2"]), WITH_GPU).faults()
    assert str(fault) == "trainer.ranks: is 2, and each rank needs a GPU, but this machine has 1. Lower it."


def test_doctor_says_that_the_gpu_is_missing_not_the_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if this_machine().gpus:
        pytest.skip("this machine has a GPU")
    file = sft_file(tmp_path, "1.5b")
    file.write_text(file.read_text(encoding="utf-8").replace('"auto"', '"cuda"'), encoding="utf-8")
    assert print_plan(file, (), directory=tmp_path, as_json=False) == 1
    printed = capsys.readouterr().out
    assert f"BROKEN {file}:7: trainer.device: is 'cuda', but this machine has no" in printed
    assert "no memory plan" not in printed
    out = tmp_path / "out"
    out.mkdir()
    file.rename(out / "config.toml")
    (out / "sft.json").write_text(json.dumps({"source_dir": str(tmp_path)}), encoding="utf-8")
    assert print_plan(out, (), directory=tmp_path, as_json=False) == 1
    assert f"BROKEN {out}/config.toml:7: trainer.device" in capsys.readouterr().out


def test_the_output_of_supervised_fine_tuning_is_no_run(tmp_path: Path) -> None:
    sft_file(tmp_path, "1.5b").rename(tmp_path / "config.toml")
    (tmp_path / "sft.json").write_text("{}", encoding="utf-8")
    with pytest.raises(RunDirectoryError, match="it is an output directory of `rollbook sft`"):
        load_resolved_config(RunDirectory(tmp_path))
