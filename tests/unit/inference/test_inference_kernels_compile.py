"""Kernels compile for the GPUs that people use, fit in the memory of a program there, and are compiled once.

They are compiled without a GPU: `make test-kernels`.
"""

import os
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from rollbook.inference.engines.embedded.build import FP8_CAPABILITY
from rollbook.inference.engines.embedded.model import eight_bits, module_kernels
from rollbook.inference.engines.embedded.model.kernels import SlotKernelOps
from rollbook.inference.engines.embedded.model.torch_ops import HeadShape
from rollbook.inference.engines.embedded.paged.step_input import PromptSlice
from rollbook.numerics.recipe import Attention, Norm
from rollbook.trainer.model.packed_attention import Packing
from tests.unit.inference import test_inference_kernels as kernels
from tests.unit.inference.test_inference_module_kernels import Layer
from tests.unit.numerics.test_numerics_operations import SEQUENCES

triton = pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1" or torch.cuda.is_available():
    pytest.skip("compiles for other GPUs, so without one and without the interpreter", allow_module_level=True)

from rollbook.inference.engines.embedded.model import triton_kernels  # noqa: E402  # they need Triton
from rollbook.numerics import triton_attention, triton_logprobs, triton_rows  # noqa: E402

SHARED_MEMORY = {80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448}
"""Bytes of a program by compute capability: A100, cards of 24 GB, the next generation of them, H200."""


class TargetDriver:
    """Takes the place of the driver of a GPU that is not there."""

    def __init__(self, capability: int) -> None:
        self._capability = capability

    def get_current_target(self) -> Any:
        return triton.backends.compiler.GPUTarget("cuda", self._capability, 32)

    def get_current_device(self) -> int:
        return self._capability

    def get_current_stream(self, device: int) -> int:
        return 0


@dataclass
class Compiled:
    """Kernels that were compiled instead of launched, and fit: the name of each launch, and what was compiled for a name."""

    names: list[str] = field(default_factory=list)
    binaries: dict[str, list[Any]] = field(default_factory=dict)


@pytest.fixture(params=SHARED_MEMORY, ids="sm_{}".format)
def compiled(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Compiled:
    found = Compiled()
    launch = triton.JITFunction.run

    def compile_only(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        binary = launch(kernel, *args, grid=grid, warmup=True, **options)
        if binary.metadata.shared > SHARED_MEMORY[request.param]:
            raise triton.OutOfResources(binary.metadata.shared, SHARED_MEMORY[request.param], "shared memory")
        found.names.append(kernel.__name__)
        known = found.binaries.setdefault(kernel.__name__, [])
        if not any(binary is one for one in known):
            known.append(binary)

    monkeypatch.setattr(triton.JITFunction, "run", compile_only)
    monkeypatch.setattr("rollbook.numerics.triton_attention._fitting_stages", {})
    triton.runtime.driver.set_active(TargetDriver(request.param))
    return found


def skip_without_fp8() -> None:
    target = triton.runtime.driver.active.get_current_target()
    if target.arch < 10 * FP8_CAPABILITY[0] + FP8_CAPABILITY[1]:
        pytest.skip("the engine refuses fp8 there")


@pytest.mark.parametrize("width", [576, 28_672])
def test_lines_are_scaled_in_one_program_each(width: int, compiled: Compiled) -> None:
    skip_without_fp8()
    numbers_ME, scales_M1 = triton_kernels.launch_scaled_lines(torch.zeros(3, width, dtype=torch.bfloat16))
    assert (numbers_ME.shape, scales_M1.shape) == ((3, width), (3, 1))
    assert compiled.names == ["_scaled_lines"]


@pytest.mark.parametrize("size", [64, 128, 256])
@pytest.mark.parametrize("stored", [None, *eight_bits.LARGEST], ids=str)
def test_attention_fits_in_the_memory_of_a_program(
    size: int, stored: torch.dtype | None, compiled: Compiled, monkeypatch: pytest.MonkeyPatch
) -> None:
    if stored is eight_bits.FP8:
        skip_without_fp8()

    def zeros(*shape: int, seed: int = 0) -> torch.Tensor:
        return torch.zeros(*shape, dtype=torch.bfloat16)

    monkeypatch.setattr(kernels, "random", zeros)
    heads = HeadShape(queries=8, keys=2, size=size)
    for chunk in (64, 1024):
        prompt = PromptSlice(row=5, start=0, tokens=np.arange(40, dtype=np.int32), is_last=True)
        case = kernels.make_case(heads, chunk=chunk, pieces=[prompt], stored=stored)
        case.ops[0].rotate_and_store(case.fused(), case.step, case.blocks, Attention(scale=0.1))
        case.ops[0].attend(case.fused(), case.step, case.blocks, Attention(scale=0.1))
    sequences = SEQUENCES["shared prompts"]
    query, key, value = (zeros(sequences.num_computed, count, size) for count in (8, 2, 2))
    Packing.of(sequences, "cpu", kernel="exact").kernel(query, key, value, None, None)
    assert set(compiled.names) == {
        "_rotate_and_store",
        "_attend_decode",
        "_attend_tiles",
        "_join_splits",
        "_attend_packed",
    }


@pytest.mark.parametrize("is_grouped", [False, True])
def test_a_step_of_a_gated_delta_layer_fits_in_the_memory_of_a_program(is_grouped: bool, compiled: Compiled) -> None:
    # Those of Qwen3.5-4B.
    delta = kernels.delta_of(sizes=(128, 128), heads=(16, 32), is_grouped=is_grouped, dtype=torch.bfloat16)
    fused_NX, inputs_NCK, state_NHDV, is_added_N = kernels.delta_inputs(delta, 2)
    ops = SlotKernelOps(HeadShape(queries=2, keys=2, size=16), "silu")
    ops.delta_step(fused_NX, delta, inputs_NCK, state_NHDV, is_added_N)
    assert compiled.names == ["_step"]


@pytest.mark.parametrize(
    ("sizes", "dtype"),
    [
        ((64, 64), torch.bfloat16),
        ((80, 80), torch.float16),
        ((192, 128), torch.bfloat16),
        ((256, 256), torch.bfloat16),
        ((128, 128), torch.float32),
    ],
    ids=str,
)
def test_attention_of_one_query_fits_in_the_memory_of_a_program(
    sizes: tuple[int, int], dtype: torch.dtype, compiled: Compiled, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module_kernels, "DEVICE", "cpu")
    # One part of the positions, and several.
    for length in (200, 1025):
        query, key, value = (
            torch.zeros(2, count, length, size, dtype=dtype)
            for count, size in ((9, sizes[0]), (3, sizes[0]), (3, sizes[1]))
        )
        mask = torch.zeros(2, 1, 1, length, dtype=dtype)
        module_kernels.one_query_attention(Layer(3), query[:, :, :1], key, value, mask)
    assert compiled.names == ["_attend_one", "_attend_one", "_join_parts"]


@pytest.mark.parametrize("width", [576, 1536, 4096, 16_384])
def test_a_norm_sums_in_the_same_order_with_and_without_an_addition(width: int, compiled: Compiled) -> None:
    """The sampler adds and normalises in one kernel, the trainer in two. The layout says which thread sums what."""
    norm, x_ME = Norm(torch.ones(width, dtype=torch.bfloat16), 1e-6), torch.zeros(3, width, dtype=torch.bfloat16)
    for added_ME in (None, x_ME):
        triton_rows.launch_rms_norm(x_ME, norm, torch.empty_like(x_ME), added_ME=added_ME)
    plain, fused = (
        [line for line in one.asm["ttgir"].splitlines() if line.startswith("#blocked")]
        for one in compiled.binaries["_rms_norm"]
    )
    assert len(plain) == 1
    assert plain == fused


def test_the_kernels_of_a_training_pass_are_compiled_once_whatever_the_number_of_tokens(compiled: Compiled) -> None:
    """A kernel that is compiled again stops a step for about a second."""
    norm = Norm(torch.ones(64, dtype=torch.bfloat16), 1e-6, adds_one=False, rounds_once=False)
    for tokens in (1, 15, 16, 1000, 16_384, 20_000, 40_001):
        x_ME = torch.zeros(tokens, 64, dtype=torch.bfloat16)
        triton_rows.launch_rms_norm(x_ME, norm, torch.empty_like(x_ME))
        triton_rows.launch_rms_norm_gradient(x_ME, norm, x_ME)
        x_MRD, tables_MW = x_ME.view(tokens, 4, 16), torch.zeros(tokens, 8, dtype=torch.bfloat16)
        for is_gradient in (False, True):
            triton_rows.launch_rotate(x_MRD, tables_MW, tables_MW, torch.empty_like(x_MRD), is_gradient=is_gradient)
        triton_rows.launch_gate(x_ME, x_ME, torch.empty_like(x_ME), "silu")
        triton_rows.launch_gate_gradient(x_ME, x_ME, x_ME, "silu")
        logits_NV, of_rows_N = torch.zeros(min(tokens, 17), 2000), torch.ones(min(tokens, 17))
        reduced = triton_logprobs.launch_reduce(logits_NV, of_rows_N)
        triton_logprobs.launch_score(logits_NV, of_rows_N, reduced[:2], of_rows_N.long(), of_rows_N)
        query, key, value = (torch.zeros(tokens, count, 64, dtype=torch.bfloat16) for count in (4, 2, 2))
        tiles_4B = torch.zeros(4, -(-tokens // 16), dtype=torch.int32)
        triton_attention.launch_packed(
            query, key, value, tiles_4B, torch.empty_like(query), scale=0.1, window=None, chunk=512, lines=64
        )
    directions = {"_rotate": 2}
    assert {name: len(found) for name, found in compiled.binaries.items()} == dict.fromkeys(
        compiled.binaries, 1
    ) | directions
    assert len(compiled.binaries) == 8
