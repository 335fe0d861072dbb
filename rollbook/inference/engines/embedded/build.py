"""Builds the parts of an engine: the forward for a model, the runner for its steps, and the memory budget of the cache.

Every fast implementation has a slower fallback; `EngineParts.choices` says which was chosen and why.
"""

import logging
import os
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rollbook.contracts.errors import RunError
from rollbook.inference.config import InferenceConfig
from rollbook.inference.engines.batching import SlotBudget
from rollbook.inference.engines.embedded.graph_runner import Capture, CudaCapture, GraphRunner
from rollbook.inference.engines.embedded.live_weights import LiveWeights
from rollbook.inference.engines.embedded.model.forward import SlotModel
from rollbook.inference.engines.embedded.model.kernels import KernelOps, kernels_missing, sample_with_kernels
from rollbook.inference.engines.embedded.model.llama import LlamaForward, relative_error, unsupported_reason
from rollbook.inference.engines.embedded.model.module import ModuleForward, load_module
from rollbook.inference.engines.embedded.runner import Runner
from rollbook.inference.engines.embedded.sampling import sample
from rollbook.inference.engines.embedded.scheduler import Scheduler, StepLimits
from rollbook.inference.engines.embedded.slot_cache import SlotCache

TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.25, torch.float16: 0.05}
"""Largest accepted relative error of the Llama forward. A wrong implementation has an error above 1."""
CPU_FORWARD_TOKENS, GPU_FORWARD_TOKENS = 768, 8192
CPU_ROUND_TOKENS, GPU_ROUND_TOKENS = 4096, 16_384
GPU_AHEAD = 2
GPU_FIRST_LENGTH = 1024
CPU_MIN_PREFIX = 32
GPU_PREFIX_COST = 1.2e12
"""Tokens times parameters that a GPU prefills in the time that reusing a prefix takes: two copies and a prefill without a captured
graph. On an H200, 1,400 tokens of 135 million parameters were too few (0.79 of the speed without); this is six times as many."""
GPU_GATHER = 32
"""Maximum number of new requests that a GPU gathers for one prefill."""
GPU_MEMORY_SHARE = 0.85
"""Of the free memory after the weights are loaded; the rest is for activations, logits and captured graphs."""
HOST_MEMORY_SHARE = 0.5
"""A CPU engine shares its memory with other processes."""
UNKNOWN_MEMORY_BYTES = 2 << 30
"""Used if the system does not report its memory."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineParts:
    scheduler: Scheduler
    runner: Runner
    weights: LiveWeights
    model: SlotModel
    module: Any
    """The Hugging Face module. It shares its weights with `model`."""
    gather: int
    choices: tuple[str, ...]
    """The chosen implementations, for people."""


def build_parts(config: InferenceConfig, model_dir: Path, *, capture: Capture | None = None) -> EngineParts:
    """`capture` replaces CUDA graphs, to run the same steps without a GPU."""
    module, max_model_len = load_module(
        model_dir, device=config.device, dtype=config.dtype, max_model_len=config.max_model_len
    )
    device: torch.device = next(module.parameters()).device
    is_gpu = device.type == "cuda"
    with torch.cuda.device(device) if is_gpu else nullcontext():
        model, choices = _model(module, max_model_len, config)
    weights = LiveWeights(module, device)
    min_prefix = config.prefix_cache_least or _min_prefix(weights, is_captured=capture is not None or is_gpu)
    budget, prefix_tokens = _budget(config, model, device, min_prefix=min_prefix)
    slots = SlotCache(model.shapes, dtype=model.dtype, device=device)
    if capture is None and is_gpu:
        capture = CudaCapture()
    runner = _runner(model, slots, budget, capture=capture if config.capture_steps else None, choices=choices)
    is_captured = isinstance(runner, GraphRunner)
    scheduler = Scheduler(
        runner,
        budget=budget,
        limits=StepLimits(
            round_tokens=config.step_prefill_tokens or (GPU_ROUND_TOKENS if is_gpu else CPU_ROUND_TOKENS),
            forward_tokens=config.forward_tokens or (GPU_FORWARD_TOKENS if is_gpu else CPU_FORWARD_TOKENS),
            ahead=config.steps_ahead if config.steps_ahead is not None else (GPU_AHEAD if is_gpu else 0),
        ),
        # With captured steps, logits are in the graph's memory and cannot be kept.
        memo_rows=0 if is_captured else int(config.prompt_memo_mb * 1_000_000) // (4 * model.vocab_size),
        prefix_tokens=prefix_tokens,
        min_prefix=min_prefix,
        min_rows=budget.max_rows if is_captured else 1,
        min_length=min(GPU_FIRST_LENGTH, max_model_len) if is_captured else 1,
    )
    return EngineParts(
        scheduler=scheduler,
        runner=runner,
        weights=weights,
        model=model,
        module=module,
        gather=GPU_GATHER if is_captured else 0,
        choices=tuple(choices),
    )


def _model(module: Any, max_model_len: int, config: InferenceConfig) -> tuple[SlotModel, list[str]]:
    reason = "the config requires it" if config.forward == "module" else unsupported_reason(module)
    if reason is None:
        llama = LlamaForward(module, max_model_len=max_model_len)
        error = relative_error(llama, module)
        # Not `>`: a comparison with NaN must not pass.
        if error <= TOLERANCE[llama.dtype]:
            choices = [f"forward: llama (relative error {error:.1e})"]
            return _with_kernels(llama, module, choices), choices
        reason = f"the llama forward has a relative error of {error:.2g}"
        log.warning("the model runs through its Hugging Face module: %s", reason)
    return ModuleForward(module, max_model_len=max_model_len), [f"forward: Hugging Face module, because {reason}"]


def _with_kernels(llama: LlamaForward, module: Any, choices: list[str]) -> LlamaForward:
    """Use the Triton kernels if they are installed, compile, and agree with the module."""
    if llama.device.type != "cuda":
        return llama
    reason = kernels_missing
    torch_ops = llama.ops
    if reason is None:
        try:
            llama.ops = KernelOps(llama.heads, **llama.rotary_tables(module))
            error = relative_error(llama, module)
            reason = None if error <= TOLERANCE[llama.dtype] else f"their relative error is {error:.2g}"
            choices.append(f"kernels: Triton (relative error {error:.1e})")
        except (
            Exception
        ) as raised:  # Another version of the compiler may raise anything; torch's operations always work.
            reason = f"{type(raised).__name__}: {raised}"
    if reason is not None:
        llama.ops = torch_ops
        choices.append(f"kernels: torch, because {reason}")
        log.warning("decoding without the Triton kernels: %s", reason)
    return llama


def _runner(
    model: SlotModel, slots: SlotCache, budget: SlotBudget, *, capture: Capture | None, choices: list[str]
) -> Runner:
    has_kernels = isinstance(model, LlamaForward) and isinstance(model.ops, KernelOps)
    sampler = sample_with_kernels if has_kernels else sample
    if capture is None or not isinstance(model, LlamaForward):
        choices.append("steps: called directly")
        return Runner(model, slots, max_rows=budget.max_rows, sampler=sampler)
    choices.append("steps: captured graphs")
    return GraphRunner(
        model,
        slots,
        max_rows=budget.max_rows,
        sampler=sampler,
        capture=capture,
        needs_length=model.ops.needs_length,
    )


def _min_prefix(weights: LiveWeights, *, is_captured: bool) -> int:
    """Shorter prefixes are faster to compute again than to copy."""
    return int(GPU_PREFIX_COST / weights.num_parameters) if is_captured else CPU_MIN_PREFIX


def _budget(
    config: InferenceConfig, model: SlotModel, device: torch.device, *, min_prefix: int
) -> tuple[SlotBudget, int]:
    """The budget of running requests, and the number of positions for the prefix cache: a share of the same memory."""
    per_token = SlotCache.bytes_per_token(model.shapes, model.dtype)
    max_bytes = _cache_bytes(device, config.kv_memory_mb)
    # The cache has one extra slot as scratch space.
    tokens = max_bytes // per_token - model.max_model_len
    if tokens < model.max_model_len:
        raise RunError(
            f"the cache may use {max_bytes / 1e6:.0f} MB, but one sequence of {model.max_model_len} tokens and a scratch slot need "
            f"{2 * model.max_model_len * per_token / 1e6:.0f}; raise inference.kv_memory_mb or lower inference.max_model_len"
        )
    share = int(tokens * config.prefix_cache_share) if min_prefix < model.max_model_len else 0
    prefix_tokens = min(share, tokens - model.max_model_len)
    budget = SlotBudget(max_rows=config.max_running, max_length=model.max_model_len, max_tokens=tokens - prefix_tokens)
    return budget, prefix_tokens


def _cache_bytes(device: torch.device, kv_memory_mb: float | str) -> int:
    """Maximum size of keys and values. It is allocated on demand."""
    if not isinstance(kv_memory_mb, str):
        return int(kv_memory_mb * 1_000_000)
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free * GPU_MEMORY_SHARE)
    return int(_available_host_bytes() * HOST_MEMORY_SHARE)


def _available_host_bytes() -> int:
    """Memory that can be allocated without swapping."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    except (ValueError, OSError, AttributeError):
        return UNKNOWN_MEMORY_BYTES
