"""The command line of the vLLM servers that a run starts."""

from typing import Any

import pytest

from rollbook.contracts.errors import RunError
from rollbook.inference.config import InferenceConfig
from rollbook.run.processes.vllm_server import server_command


def command(
    *, gpus: int = 1, adapter_rank: int | None = None, vllm: dict[str, Any] | None = None, **inference: Any
) -> list[str]:
    table = {"engine": "vllm", "vllm": {"python": "python", **(vllm or {})}, **inference}
    config = InferenceConfig.model_validate(table)
    return server_command(config, "model", "http://127.0.0.1:9", adapter_rank=adapter_rank, gpus=gpus)


def test_graphs_are_compiled_on_a_gpu_and_prefixes_are_cached() -> None:
    on_gpu = command(device="cuda", dtype="bfloat16")
    assert "--enforce-eager" not in on_gpu
    assert "--enable-prefix-caching" in on_gpu
    assert "--gpu-memory-utilization" not in on_gpu
    assert "--enforce-eager" in command(device="cpu")


def test_settings_reach_the_server() -> None:
    built = command(
        device="cuda",
        dtype="bfloat16",
        gpus=2,
        vllm={
            "enforce_eager": True,
            "gpu_memory_share": 0.45,
            "prefix_caching": False,
            "args": ["--max-num-seqs", "8"],
        },
    )
    assert "--enforce-eager" in built
    assert built[built.index("--gpu-memory-utilization") + 1] == "0.45"
    assert "--no-enable-prefix-caching" in built
    assert built[built.index("--tensor-parallel-size") + 1] == "2"
    assert built[-2:] == ["--max-num-seqs", "8"], "additional arguments come last"


def test_an_interpreter_is_required() -> None:
    with pytest.raises(RunError, match=r"inference\.vllm\.python is not set"):
        command(vllm={"python": None})
