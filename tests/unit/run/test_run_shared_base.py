"""Whether trainer and policy servers share the frozen base of adapters, what the plan counts, and the reason if they do not."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from rollbook.run.config.run import RunConfig, load_config
from rollbook.run.resources.automatic import Resolution, resolve
from rollbook.run.resources.machine import GB, Gpu, Machine
from rollbook.run.resources.memory_plan import gpu
from tests.parts.run.projects import project

GPUS = tuple(Gpu(number=number, name="NVIDIA H200", memory_bytes=150 * GB) for number in range(2))
WITH_GPU = Machine(gpus=GPUS[:1], cores=16, memory_bytes=128 * GB)
WITHOUT_GPU = Machine(cores=16, memory_bytes=128 * GB)
VLLM = ["inference.engine=vllm", "inference.vllm.python=python3"]


def resolved(file: Path, *overrides: str, machine: Machine = WITH_GPU, recorded: RunConfig | None = None) -> Resolution:
    return resolve(load_config(file, overrides), machine, recorded=recorded)


LORA = ["trainer.lora.rank=16"]


def test_with_lora_on_one_gpu_the_base_is_shared_and_planned_once(tmp_path: Path) -> None:
    file = project(tmp_path, "8b")
    found = resolved(file, *LORA)
    assert found.chosen["resources.shared_base"] is True
    assert found.plan is not None
    (base,) = {part.num_bytes for part in found.plan.parts if part.num_bytes >= 16 * GB and part.what == "weights"}
    (line,) = [line for line in found.lines() if line.startswith("GPU 0")]
    assert f"base {(base + 700e6) / GB:.1f} (weights {base / GB:.1f}, context 0.7)" in line
    apart = resolved(file, *LORA, "resources.shared_base=false")
    assert apart.plan is not None
    assert apart.plan.total(gpu(0)) - apart.sizes.kv_bytes > found.plan.total(gpu(0)) - found.sizes.kv_bytes + 10 * GB
    assert resolved(file, machine=WITH_GPU, recorded=found.loaded.config).loaded.config.resources.shared_base


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["inference.dtype=float32"], "trainer.compute_dtype is bfloat16 and inference.dtype is float32"),
        (["inference.publish=full"], "whole weights are published"),
        (["trainer.lora.experts=true"], "whole weights are published"),
        (["inference.device=cpu", "inference.dtype=bfloat16"], "the trainer is on cuda and the policy on cpu"),
        (VLLM, "not those of engine = 'transformers'"),
    ],
)
def test_a_base_that_cannot_be_shared_is_not_and_the_reason_is_said(
    tmp_path: Path, overrides: list[str], reason: str
) -> None:
    file = project(tmp_path, "1.5b")
    found = resolved(file, *LORA, *overrides)
    assert "resources.shared_base" not in found.chosen
    assert any(note.startswith("base: each process loads its own") and reason in note for note in found.notes)
    (fault,) = resolved(file, *LORA, *overrides, "resources.shared_base=true").faults()
    assert fault.path == "resources.shared_base"
    assert reason in fault.message


def test_a_base_smaller_than_the_context_of_its_owner_is_not_shared_unless_it_is_set(tmp_path: Path) -> None:
    file = project(tmp_path, "135m")
    found = resolved(file, *LORA)
    assert "resources.shared_base" not in found.chosen
    assert "base: each process loads its own, because that would save 0.3 GB" in "\n".join(found.lines())
    assert resolved(file, *LORA, "resources.shared_base=true").faults() == []


def test_trainer_and_servers_on_different_gpus_do_not_share_the_base(tmp_path: Path) -> None:
    file = project(tmp_path, "1.5b")
    named = ["resources.trainer_gpus=[0]", "resources.policy_gpus=[1]"]
    found = resolved(file, *LORA, *named, machine=Machine(gpus=GPUS, cores=16, memory_bytes=128 * GB))
    assert "resources.shared_base" not in found.chosen
    assert not any(note.startswith("base:") for note in found.notes), "no one would expect it"
    (fault,) = resolved(
        file, *LORA, *named, "resources.shared_base=true", machine=Machine(gpus=GPUS, cores=16, memory_bytes=128 * GB)
    ).faults()
    assert "on different GPUs" in fault.message


@pytest.mark.skipif(sys.platform != "linux", reason="main memory is shared on Linux only")
def test_on_a_cpu_the_base_is_shared_on_request_only_and_only_with_lora(tmp_path: Path) -> None:
    file = project(tmp_path, "135m")
    assert resolved(file, *LORA, machine=WITHOUT_GPU).chosen == {}
    shared = resolved(file, *LORA, "resources.shared_base=true", machine=WITHOUT_GPU)
    assert shared.faults() == []
    assert shared.plan is not None
    assert shared.plan.total("main memory", "base") > 0
    (fault,) = resolved(file, "resources.shared_base=true", machine=WITHOUT_GPU).faults()
    assert "trainer.lora is not set" in fault.message


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("adapter_config.json", {}, "the model is an adapter"),
        ("config.json", {"quantization_config": {"quant_method": "fp8"}}, "the model's files are quantised"),
    ],
)
def test_a_model_whose_weights_cannot_be_shared_is_found_in_its_files(
    tmp_path: Path, name: str, content: dict[str, Any], reason: str
) -> None:
    file = project(tmp_path, "1.5b")
    path = tmp_path / "1.5b" / name
    before = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    path.write_text(json.dumps({**before, **content}), encoding="utf-8")
    assert any(reason in note for note in resolved(file, *LORA).notes)
