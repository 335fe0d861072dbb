"""A process that runs out of memory outside of a step: the fault it reports, with the plan and the settings that help."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from rollbook.contracts.errors import RunError
from rollbook.run.config.run import LoadedConfig, load_config
from rollbook.run.resources.automatic import resolve
from rollbook.run.resources.machine import GB, Gpu, Machine
from rollbook.run.resources.shortage import replay_shortage, sft_shortage
from rollbook.run.supervision.channel import Channel
from rollbook.run.supervision.child_main import exit_code_of
from rollbook.run.supervision.exits import EXIT_NO_MEMORY, EXIT_STOP_RUN
from rollbook.telemetry.events import EventLog
from tests.parts.run.projects import project

CUDA = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 22.35 GiB of which 1.00 GiB is free."
)
TORCH = f"{CUDA} If reserved but unallocated memory is large try setting PYTORCH_ALLOC_CONF."
REFUSED = "publication 1 at http://x was refused: the policy server has no memory for the new weights on cuda: "


def loaded_for(tmp_path: Path, *overrides: str) -> LoadedConfig:
    machine = Machine(gpus=(Gpu(number=0, name="L4", memory_bytes=24 * GB),), cores=8, memory_bytes=64 * GB)
    return resolve(load_config(project(tmp_path, "0.5b"), overrides), machine).loaded


class _Reports(Channel):
    def __init__(self, activity: str) -> None:
        super().__init__(None)
        self.activity = activity
        self.faults: list[str] = []

    def fault(self, message: str) -> None:
        self.faults.append(message)


def reported(loaded: LoadedConfig | None, process: str, doing: str, error: BaseException) -> tuple[int, str]:
    channel = _Reports(doing)
    code = exit_code_of(error, channel, EventLog("test", echo=io.StringIO()), name=process, loaded=loaded)
    assert len(channel.faults) == 1
    return code, channel.faults[0]


@pytest.mark.parametrize(
    ("process", "doing"),
    [("policy", "loading the model"), ("trainer", "loading the model"), ("trainer", "training step 3")],
)
def test_a_full_gpu_is_reported_with_the_activity_the_plan_and_the_settings_that_help(
    tmp_path: Path, process: str, doing: str
) -> None:
    code, fault = reported(loaded_for(tmp_path), process, doing, torch.OutOfMemoryError(TORCH))
    assert code == EXIT_NO_MEMORY
    first, *lines = fault.splitlines()
    assert first == f"out of memory while {doing}: {CUDA}"
    text = "\n".join(lines)
    for part in ("planned for GPU 0", "trainer ", "policy ", "optimizer", "trainer.lora.rank = 16 saves"):
        assert part in text


def test_a_full_main_memory_is_not_taken_for_a_full_gpu(tmp_path: Path) -> None:
    error = RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 99 bytes.")
    loaded = loaded_for(tmp_path)
    for cause in (error, MemoryError()):
        _, fault = reported(loaded, "trainer", "training step 2", cause)
        assert "planned for main memory" in fault
        assert "GPU" not in fault


def test_a_process_with_a_limit_of_its_own_is_told_what_it_can_save_itself(tmp_path: Path) -> None:
    limited = loaded_for(tmp_path, "run.gpu_memory_gb=23")
    _, fault = reported(limited, "policy", "loading the model", torch.OutOfMemoryError(CUDA))
    plan, _, advice = fault.partition("change a setting")
    assert f"policy may use {limited.config.inference.gpu_memory_gb:g} (inference.gpu_memory_gb)" in plan
    assert "inference.max_running" in advice
    assert "trainer.max_tokens_per_microbatch" not in advice
    assert "trainer.gradient_checkpointing" not in advice


def test_an_update_that_a_policy_server_refused_stops_the_run_with_the_plan(tmp_path: Path) -> None:
    code, fault = reported(loaded_for(tmp_path), "trainer", "", RunError(f"{REFUSED}{CUDA}"))
    assert code == EXIT_STOP_RUN
    assert fault.startswith(REFUSED)
    assert "planned for GPU 0" in fault


def test_without_a_plan_the_cause_is_still_reported(tmp_path: Path) -> None:
    loaded = loaded_for(tmp_path)
    config: Any = tmp_path / "0.5b" / "config.json"
    config.write_text(json.dumps({"unknown": 1}), encoding="utf-8")
    _, fault = reported(loaded, "trainer", "loading the model", torch.OutOfMemoryError(CUDA))
    assert fault.startswith(f"out of memory while loading the model: {CUDA}")
    assert "docs/gpu.md" in fault
    _, fault = reported(None, "trainer", "", torch.OutOfMemoryError(CUDA))
    assert fault == CUDA


def test_a_training_without_a_run_is_told_its_own_settings(tmp_path: Path) -> None:
    loaded = loaded_for(tmp_path)
    trainer, error = loaded.config.trainer, torch.OutOfMemoryError(TORCH)
    text = sft_shortage(
        loaded.config.model, trainer, loaded.source_dir, longest=2048, doing="training step 3", error=error
    )
    assert text.startswith(f"out of memory while training step 3: {CUDA}\n  planned for GPU 0, in GB:\n    trainer ")
    assert "trainer.lora.rank = 16 saves" in text
    assert "policy" not in text
    verification, comparison = (
        replay_shortage(loaded, doing="replaying the run", error=error, is_comparison=is_comparison)
        for is_comparison in (False, True)
    )
    assert verification.endswith("Free some memory there.")
    assert "--set trainer.optimizer_state" in comparison


def test_a_rank_of_another_machine_is_told_the_plan_of_the_trainer(tmp_path: Path) -> None:
    _, fault = reported(loaded_for(tmp_path), "rank-1", "training as rank 1", torch.OutOfMemoryError(CUDA))
    assert "planned for GPU 0" in fault
