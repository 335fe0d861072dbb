"""Puts an engine's inside together: which forward a model gets, how steps are run, how much memory the cache may take.

Every fast way has a slower one behind it, and `EngineParts.ways` says which was taken and why.
"""

import logging
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rollbook.contracts.errors import RunError
from rollbook.inference.config import InferenceConfig
from rollbook.inference.engines.batching import SlotBudget
from rollbook.inference.engines.embedded.cache.memory_budget import cache_bytes
from rollbook.inference.engines.embedded.cache.slot_cache import SlotCache
from rollbook.inference.engines.embedded.live_weights import LiveWeights
from rollbook.inference.engines.embedded.model.forward import SlotModel
from rollbook.inference.engines.embedded.model.graph_runner import Capture, CudaCapture, GraphRunner
from rollbook.inference.engines.embedded.model.kernels import KernelOps, kernels_missing, sample_with_kernels
from rollbook.inference.engines.embedded.model.llama import LeanLM, disagreement, why_not_lean
from rollbook.inference.engines.embedded.model.module import CausalLM, load_module
from rollbook.inference.engines.embedded.rounds import StepLimits
from rollbook.inference.engines.embedded.runner import Runner
from rollbook.inference.engines.embedded.sampling import sample
from rollbook.inference.engines.embedded.scheduler import Stepper

TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.25, torch.float16: 0.05}
"""How far the lean forward may be from the module's, as a share of the spread of the logits. Wrong ones are off by more than 1."""
CPU_FORWARD_TOKENS, GPU_FORWARD_TOKENS = 768, 8192
CPU_ROUND_TOKENS, GPU_ROUND_TOKENS = 4096, 16_384
GPU_AHEAD = 2
GPU_FIRST_LENGTH = 1024
CPU_LEAST_PREFIX = 32
GPU_PREFIX_COST = 1.2e12
"""Tokens times parameters that a GPU prefills in the time that taking over a prefix costs it: two copies and a prefill that is not
captured. On an H200 about 1,400 tokens of 135 million were too few (0.79 of the speed without); this asks for six times as many."""
GPU_GATHER = 32
"""Newcomers that a GPU gathers for one prefill at most."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineParts:
    stepper: Stepper
    runner: Runner
    weights: LiveWeights
    model: SlotModel
    gather: int
    ways: tuple[str, ...]
    """What was chosen, for people."""


def assemble(config: InferenceConfig, model_dir: Path, *, capture: Capture | None = None) -> EngineParts:
    """`capture` stands in for CUDA graphs where there is no GPU, to run the same steps without one."""
    module, max_model_len = load_module(
        model_dir, device=config.device, dtype=config.dtype, max_model_len=config.max_model_len
    )
    device: torch.device = next(module.parameters()).device
    is_gpu = device.type == "cuda"
    with torch.cuda.device(device) if is_gpu else nullcontext():
        model, ways = _model(module, max_model_len, config)
    weights = LiveWeights(module, device)
    least_prefix = config.prefix_cache_least or _least_prefix(weights, is_captured=capture is not None or is_gpu)
    budget, prefix_tokens = _budget(config, model, device, least_prefix=least_prefix)
    slots = SlotCache(model.shapes, dtype=model.dtype, device=device)
    if capture is None and is_gpu:
        capture = CudaCapture()
    runner = _runner(model, slots, budget, capture=capture if config.capture_steps else None, ways=ways)
    is_captured = isinstance(runner, GraphRunner)
    stepper = Stepper(
        runner,
        budget=budget,
        limits=StepLimits(
            round_tokens=config.step_prefill_tokens or (GPU_ROUND_TOKENS if is_gpu else CPU_ROUND_TOKENS),
            forward_tokens=config.forward_tokens or (GPU_FORWARD_TOKENS if is_gpu else CPU_FORWARD_TOKENS),
            ahead=config.steps_ahead if config.steps_ahead is not None else (GPU_AHEAD if is_gpu else 0),
        ),
        # Where steps are captured, logits live in the graph's memory: they are not kept.
        memo_rows=0 if is_captured else int(config.prompt_memo_mb * 1_000_000) // (4 * model.vocab_size),
        prefix_tokens=prefix_tokens,
        least_prefix=least_prefix,
        min_rows=budget.max_rows if is_captured else 1,
        min_length=min(GPU_FIRST_LENGTH, max_model_len) if is_captured else 1,
    )
    gather = GPU_GATHER if is_captured else 0
    return EngineParts(stepper=stepper, runner=runner, weights=weights, model=model, gather=gather, ways=tuple(ways))


def _model(module: Any, max_model_len: int, config: InferenceConfig) -> tuple[SlotModel, list[str]]:
    reason = "the config asks for it" if config.forward == "module" else why_not_lean(module)
    if reason is None:
        lean = LeanLM(module, max_model_len=max_model_len)
        off = disagreement(lean, module)
        # Not "greater than": a comparison with NaN must not pass.
        if off <= TOLERANCE[lean.dtype]:
            ways = [f"forward: lean ({off:.1e} of the logits' spread from the module's own)"]
            return _with_kernels(lean, module, ways), ways
        reason = f"the lean forward is off by {off:.2g} of the logits' spread"
        log.warning("the model runs through its own module: %s", reason)
    return CausalLM(module, max_model_len=max_model_len), [f"forward: the module's own, because {reason}"]


def _with_kernels(lean: LeanLM, module: Any, ways: list[str]) -> LeanLM:
    """Our kernels, if they are here, compile, and agree with the module."""
    if lean.device.type != "cuda":
        return lean
    reason = kernels_missing
    plain = lean.ops
    if reason is None:
        try:
            lean.ops = KernelOps(lean.heads, **lean.rotary_tables(module))
            off = disagreement(lean, module)
            reason = None if off <= TOLERANCE[lean.dtype] else f"they are off by {off:.2g} of the logits' spread"
            ways.append(f"kernels: Triton ({off:.1e} of the logits' spread from the module's own)")
        except (
            Exception
        ) as error:  # a compiler of another version may raise anything; torch's own operations always work
            reason = f"{type(error).__name__}: {error}"
    if reason is not None:
        lean.ops = plain
        ways.append(f"kernels: torch's own, because {reason}")
        log.warning("decoding without our kernels: %s", reason)
    return lean


def _runner(
    model: SlotModel, slots: SlotCache, budget: SlotBudget, *, capture: Capture | None, ways: list[str]
) -> Runner:
    has_kernels = isinstance(model, LeanLM) and isinstance(model.ops, KernelOps)
    sampler = sample_with_kernels if has_kernels else sample
    if capture is None or not isinstance(model, LeanLM):
        ways.append("steps: called directly")
        return Runner(model, slots, max_rows=budget.max_rows, sampler=sampler)
    ways.append("steps: captured graphs")
    return GraphRunner(
        model,
        slots,
        max_rows=budget.max_rows,
        sampler=sampler,
        capture=capture,
        needs_length=model.ops.needs_length,
    )


def _least_prefix(weights: LiveWeights, *, is_captured: bool) -> int:
    """Beginnings that are shorter are computed again sooner than copied."""
    return int(GPU_PREFIX_COST / weights.num_parameters) if is_captured else CPU_LEAST_PREFIX


def _budget(
    config: InferenceConfig, model: SlotModel, device: torch.device, *, least_prefix: int
) -> tuple[SlotBudget, int]:
    """For running requests, and positions that may be kept of finished ones: a share of the same memory."""
    per_token = SlotCache.bytes_per_token(model.shapes, model.dtype)
    bytes_at_most = cache_bytes(device, config.kv_memory_mb)
    # One slot more than is used stands by as scratch.
    tokens = bytes_at_most // per_token - model.max_model_len
    if tokens < model.max_model_len:
        raise RunError(
            f"the cache may take {bytes_at_most / 1e6:.0f} MB, but one sequence of {model.max_model_len} tokens and a spare one "
            f"take {2 * model.max_model_len * per_token / 1e6:.0f}; raise inference.kv_memory_mb or lower inference.max_model_len"
        )
    share = int(tokens * config.prefix_cache_share) if least_prefix < model.max_model_len else 0
    kept = min(share, tokens - model.max_model_len)
    budget = SlotBudget(max_rows=config.max_running, max_length=model.max_model_len, max_tokens=tokens - kept)
    return budget, kept
