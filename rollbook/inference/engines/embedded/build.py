"""Builds the parts of an engine: the forward for a model, the runner for its steps, and the memory budget of the cache.

Every fast implementation has a slower fallback; `EngineParts.choices` says which was chosen and why.
"""

import logging
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch

from rollbook.contracts.errors import RunError, is_out_of_memory
from rollbook.contracts.weights import Adapter, WeightsError
from rollbook.inference.config import InferenceConfig
from rollbook.inference.engines.batching import SlotBudget
from rollbook.inference.engines.embedded.captured_runner import CapturedRunner, captured_error
from rollbook.inference.engines.embedded.live_weights import LiveWeights
from rollbook.inference.engines.embedded.model import eight_bits
from rollbook.inference.engines.embedded.model.capture import Capture, CudaCapture
from rollbook.inference.engines.embedded.model.forward import SlotModel
from rollbook.inference.engines.embedded.model.kernels import KernelOps, SlotKernelOps, sample_with_kernels
from rollbook.inference.engines.embedded.model.llama import LlamaForward, relative_error
from rollbook.inference.engines.embedded.model.module import (
    ModuleForward,
    StateForward,
    has_full_attention,
    load_module,
)
from rollbook.inference.engines.embedded.model.module_kernels import StepKernels
from rollbook.inference.engines.embedded.paged.batch import PagedBatch
from rollbook.inference.engines.embedded.paged.block_cache import BlockCache
from rollbook.inference.engines.embedded.paged.block_pool import BlockPool
from rollbook.inference.engines.embedded.paged.runner import PackedRunner, packed_error
from rollbook.inference.engines.embedded.routes import RouteRecorder, has_experts, no_experts
from rollbook.inference.engines.embedded.runner import Runner
from rollbook.inference.engines.embedded.sampling import sample
from rollbook.inference.engines.embedded.scheduler import Scheduler
from rollbook.inference.engines.embedded.slot_batch import SlotBatch
from rollbook.inference.weights.lora import CONFIG_FILE, read_adapter
from rollbook.numerics.device_memory import limit_memory
from rollbook.numerics.module_parts import UnsupportedModelError
from rollbook.numerics.operations import EXACT_DTYPES, kernels_missing, set_unsplit_products, why_not_here
from rollbook.shared_weights.base import map_base

TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.25, torch.float16: 0.05}
"""Largest accepted relative error of the Llama forward. A wrong implementation has an error above 1."""
CPU_FORWARD_TOKENS, GPU_STEP_TOKENS = 768, 4096
CPU_ROUND_TOKENS = 4096
GPU_AHEAD = 2
EIGHT_BITS_TOLERANCE = 0.25
"""The same with 8 bits for each number of keys and values."""
FP8_WEIGHTS_TOLERANCE = 0.75
"""The same for 8-bit products. A trained model of 135M parameters has 0.6 at its worst token, 0.1 on average."""
FP8_CAPABILITY = 8, 9
"""Compute capability of the first GPUs that convert 8-bit floats."""
ROUTED_TEXTS = 4
FIRST_SHARE = 0.25
"""Share of an automatic limit that is allocated at first: a trainer may use the same GPU. More follows on demand."""
BLOCK_SIZE = 16
CPU_MIN_PREFIX = 32
GPU_MEMORY_SHARE = 0.85
"""Share of the free memory after the weights are loaded; the rest is for activations, logits and captured graphs."""
HOST_MEMORY_SHARE = 0.5
"""A CPU engine shares its memory with other processes."""
UNKNOWN_MEMORY_BYTES = 2 << 30
"""Used if the system does not report its memory."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineParts:
    scheduler: Scheduler
    runner: Runner | PackedRunner
    weights: LiveWeights
    model: SlotModel
    module: Any
    """The Hugging Face module. It shares its weights with `model`."""
    choices: tuple[str, ...]
    """The chosen implementations, for people."""
    inexact_because: str | None
    """Why logprobs do not have the bits of the trainer; None: they have."""


def build_parts(
    config: InferenceConfig, model_dir: Path, *, capture: Capture | None = None, shared_base: Path | None = None
) -> EngineParts:
    """`capture` replaces CUDA graphs, to run the steps of a GPU without one. `shared_base`: see `shared_weights`."""
    limit_memory(config.device, config.gpu_memory_gb)
    base = None if shared_base is None else map_base(shared_base, device=config.device)
    module, max_model_len = load_module(
        model_dir, device=config.device, dtype=config.dtype, max_model_len=config.max_model_len, base=base
    )
    device: torch.device = next(module.parameters()).device
    is_gpu = device.type == "cuda"
    with torch.cuda.device(device) if is_gpu else nullcontext():
        model, choices = _model(module, max_model_len, config)
        if config.kv_dtype != "auto":
            store_eight_bits(model, module, choices, kv_dtype=config.kv_dtype)
        if config.weights_dtype != "auto":
            use_fp8_weights(model, module, choices)
        # Steps over blocks have no lines for recurrent states.
        packing = model if isinstance(model, LlamaForward) and not model.states else None
        has_kernels = (
            isinstance(model, LlamaForward)
            and is_gpu
            and use_kernels(model, module, choices, exactness=config.exactness)
        )
        is_paged = packing is not None and (has_kernels if is_gpu else capture is not None)
        if capture is None and is_gpu and config.capture_steps:
            capture = CudaCapture()
        if is_gpu and isinstance(model, ModuleForward | StateForward):
            use_step_kernels(model, module, choices)
        if packing is None:
            model, capture = _captured(model, module, capture, choices)
    inexact_because = _inexact_because(config, model, choices)
    renew = model.renew_copies if isinstance(model, LlamaForward) else (lambda: None)
    weights = LiveWeights(module, device, model.adapters, base=base, on_new_base=renew)
    if (model_dir / CONFIG_FILE).is_file():
        _apply_adapter(weights, model_dir)
    batch: SlotBatch | PagedBatch
    runner: Runner | PackedRunner
    if packing is not None and is_paged:
        batch, runner = _paged_batch(config, packing, capture or _plain_call)
        choices.append("cache: blocks, prompts and decoding rows in one captured forward")
    else:
        batch, runner = _slot_batch(config, model, capture if packing is None else None)
        memory = "states" if isinstance(model, StateForward) else "slots"
        steps = "decode steps captured" if isinstance(runner, CapturedRunner) else "steps called directly"
        choices.append(f"cache: {memory}, {steps}")
    ahead = config.steps_ahead if config.steps_ahead is not None else (GPU_AHEAD if is_gpu else 0)
    if config.draft_tokens:
        if not isinstance(model, LlamaForward):
            raise RunError(f"inference.draft_tokens needs the fast forward, and this model has another: {choices[0]}")
        if packing is None:
            raise RunError(
                "inference.draft_tokens needs attention in all layers, and this model has recurrent ones: their states cannot go "
                "back to before a wrong draft"
            )
        choices.append(f"drafts: up to {config.draft_tokens} tokens from prompt and answer, no steps ahead")
        ahead = 0
    scheduler = Scheduler(
        batch,
        max_length=max_model_len,
        ahead=ahead,
        draft_tokens=config.draft_tokens,
        step_tokens=config.forward_tokens or (GPU_STEP_TOKENS if is_paged else CPU_FORWARD_TOKENS),
    )
    return EngineParts(
        scheduler=scheduler,
        runner=runner,
        weights=weights,
        model=model,
        module=module,
        choices=tuple(choices),
        inexact_because=inexact_because,
    )


def _apply_adapter(weights: LiveWeights, directory: Path) -> None:
    """A PEFT directory, such as a checkpoint of a run with LoRA: its adapter is the policy's."""
    try:
        settings, tensors = read_adapter(directory)
        weights.apply(weights.plan_adapter(Adapter(name=directory.name, settings=settings), tensors))
    except (OSError, WeightsError) as error:
        raise RunError(f"the adapter in {directory} could not be loaded: {error}") from error


def _model(module: Any, max_model_len: int, config: InferenceConfig) -> tuple[SlotModel, list[str]]:
    reason = "the config requires it"
    if config.forward != "module":
        try:
            llama = LlamaForward(module, max_model_len=max_model_len, records_routes=config.record_routes)
        except UnsupportedModelError as unsupported:
            reason = str(unsupported)
        else:
            if config.record_routes and llama.route_shape is None:
                raise RunError(no_experts(module.config.model_type))
            with llama.short_windows(module):
                error = _error_of(llama, module)
            # Not `>`: a comparison with NaN must not pass.
            if error <= TOLERANCE[llama.dtype]:
                choice = f"forward: llama (relative error {error:.1e})"
                return llama, [choice, *([] if llama.route_shape is None else [str(llama.route_shape)])]
            reason = f"the llama forward has a relative error of {error:.2g}"
            log.warning("the model runs through its Hugging Face module: %s", reason)
    recorder = RouteRecorder(module) if config.record_routes else None
    model, choices = _module_forward(module, max_model_len, reason, recorder)
    if recorder is not None:
        choices.append(str(recorder.shape))
    return model, choices


def _module_forward(
    module: Any, max_model_len: int, reason: str, recorder: RouteRecorder | None
) -> tuple[SlotModel, list[str]]:
    """The fastest way of calling the module whose logits are those of a plain forward."""
    choice = f"forward: Hugging Face module, because {reason}"
    if has_full_attention(module.config, max_model_len):
        slots = ModuleForward(module, max_model_len=max_model_len, recorder=recorder)
        if _error_of(slots, module) <= TOLERANCE[slots.dtype]:
            return slots, [choice]
        slots.discard()
    errors = []
    for is_merged, is_chunked in product((True, False), repeat=2):
        states = StateForward(
            module, max_model_len=max_model_len, is_merged=is_merged, is_chunked=is_chunked, recorder=recorder
        )
        if is_merged and not states.new_memory().is_mergeable:
            continue
        errors.append(_error_of(states, module))
        if errors[-1] <= TOLERANCE[states.dtype]:
            return states, [choice, f"state: caches of transformers, {states.how}"]
    raise RunError(
        f"a model of type {module.config.model_type!r} computes other logits with its cache than without (relative error "
        f"{min(errors):.2g}), so sampled logprobs would be wrong. Serve it with vLLM"
    )


def store_eight_bits(model: SlotModel, module: Any, choices: list[str], *, kv_dtype: str) -> None:
    why_not = None
    if not isinstance(model, LlamaForward):
        why_not = _has_another_forward(choices)
    elif model.states:
        why_not = "it needs attention in all layers, and this model has recurrent ones"
    elif kv_dtype == "fp8" and _is_older(model.device, FP8_CAPABILITY):
        why_not = f'{_cannot_convert(model.device)}; "int8" needs none'
    else:
        model.store_eight_bits(kv_dtype)
        why_not = _error_with(model, module, choices, f"keys and values: {kv_dtype}")
    if why_not is not None:
        raise RunError(f'inference.kv_dtype = "{kv_dtype}" cannot be used: {why_not}. Set it to "auto"')


def use_fp8_weights(model: SlotModel, module: Any, choices: list[str]) -> None:
    if not isinstance(model, LlamaForward):
        why_not: str | None = _has_another_forward(choices)
    elif model.states or has_experts(module):
        why_not = "it needs attention in all layers and no experts"
    elif _is_older(model.device, FP8_CAPABILITY):
        why_not = _cannot_convert(model.device)
    else:
        why_not = eight_bits.why_no_products(model.device, model.dtype, [each.weight_OE for each in model.projections])
    if why_not is None and isinstance(model, LlamaForward):
        model.use_fp8_weights()
        why_not = _error_with(model, module, choices, "weights of projections: fp8")
    if why_not is not None:
        raise RunError(f'inference.weights_dtype = "fp8" cannot be used: {why_not}. Set it to "auto"')


def _has_another_forward(choices: list[str]) -> str:
    return f"it needs the fast forward, and this model has another ({choices[0]})"


def _cannot_convert(device: torch.device) -> str:
    name = torch.cuda.get_device_name(device)
    return f"{name} cannot convert 8-bit floats, which begin with compute capability 8.9"


def _error_with(model: LlamaForward, module: Any, choices: list[str], what: str) -> str | None:
    """Why the logits are too far from those of the module; None if they are not."""
    with model.short_windows(module):
        error = _error_of(model, module)
    choices.append(f"{what} (relative error {error:.1e})")
    if error <= _tolerance(model):  # not `>`: a comparison with NaN must not pass
        return None
    return f"with it, the logits of this model have a relative error of {error:.2g}"


def _tolerance(model: SlotModel) -> float:
    if not isinstance(model, LlamaForward):
        return TOLERANCE[model.dtype]
    if model.has_fp8_weights:
        return FP8_WEIGHTS_TOLERANCE
    return EIGHT_BITS_TOLERANCE if model.cache_dtype in eight_bits.LARGEST else TOLERANCE[model.dtype]


def _is_older(device: torch.device, capability: tuple[int, int]) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) < capability


def _error_of(forward: SlotModel, module: Any) -> float:
    """Infinite where the module does not accept this way of calling it."""
    try:
        return _least_error(module, _tolerance(forward), lambda seed: relative_error(forward, module, seed=seed))
    except (TypeError, ValueError, AttributeError, RuntimeError, IndexError) as error:
        if is_out_of_memory(error):
            raise
        log.info("the module cannot be run as %s: %s", type(forward).__name__, error)
        return math.inf


def _least_error(module: Any, accepted: float, error_of: Callable[[int], float]) -> float:
    """Of a text; with experts, of several texts, until one is accepted. Where two scores of a router are nearly equal, another
    rounding chooses another expert; a wrong implementation has an error in every text."""
    errors = [math.inf]
    for seed in range(ROUTED_TEXTS if has_experts(module) else 1):
        errors.append(error_of(seed))
        if errors[-1] <= accepted:
            return errors[-1]
    return min(errors[1:])


def use_kernels(llama: LlamaForward, module: Any, choices: list[str], *, exactness: str) -> bool:
    """Use the Triton kernels if they are installed, compile, and agree with the module. Otherwise nothing is changed."""
    reason = kernels_missing
    if reason is None:
        torch_ops = llama.ops, llama.packed_ops
        try:
            can_be = llama.recipe.inexact_because is None and llama.dtype in EXACT_DTYPES and why_not_here() is None
            is_exact = exactness == "bitwise" and can_be
            if llama.states:
                llama.ops = SlotKernelOps(llama.heads, llama.recipe.activation)
            else:
                llama.packed_ops = KernelOps(llama.heads, llama.recipe.activation)
            if is_exact:
                # Before the check, because exact products have kernels of their own.
                _set_exact(llama, is_exact=True)
            with llama.short_windows(module):
                error = _least_error(
                    module,
                    _tolerance(llama),
                    lambda seed: (
                        relative_error(llama, module, seed=seed)
                        if llama.states
                        else packed_error(llama, module, block_size=BLOCK_SIZE, seed=seed)
                    ),
                )
            if error <= _tolerance(llama):
                numbers = "with the bits of the trainer, " if is_exact else ""
                choices.append(f"kernels: Triton ({numbers}relative error {error:.1e})")
            else:
                reason = f"their relative error is {error:.2g}"
        except (
            Exception
        ) as raised:  # Another version of the compiler may raise anything; torch's operations always work.
            if is_out_of_memory(raised):
                raise
            reason = f"{type(raised).__name__}: {raised}"
        if reason is not None:
            llama.ops, llama.packed_ops = torch_ops
            if llama.is_exact:
                _set_exact(llama, is_exact=False)
    if reason is not None:
        choices.append(f"kernels: torch, because {reason}")
        log.warning("the engine runs without the Triton kernels, several times slower: %s", reason)
    return reason is None


def use_step_kernels(model: ModuleForward | StateForward, module: Any, choices: list[str]) -> None:
    """Use Triton kernels in the decode steps of a module, if they have its logits. Otherwise nothing is changed."""
    reason = kernels_missing
    if reason is None:
        try:
            kernels = model.step_kernels = StepKernels(module)
            if (reason := kernels.reason) is None:
                # The module computes what is expected outside a step, with its own attention and norms.
                error = _least_error(
                    module, TOLERANCE[model.dtype], lambda seed: relative_error(model, module, seed=seed)
                )
                if error <= TOLERANCE[model.dtype]:
                    choices.append(f"kernels of decode steps: Triton, {kernels} (relative error {error:.1e})")
                    return
                reason = f"their relative error is {error:.2g}"
        except Exception as raised:  # As in `use_kernels`.
            if is_out_of_memory(raised):
                raise
            reason = f"{type(raised).__name__}: {raised}"
    model.step_kernels = None
    choices.append(f"kernels of decode steps: those of the module, because {reason}")
    log.warning("decode steps run without Triton kernels: %s", reason)


def _inexact_because(config: InferenceConfig, model: SlotModel, choices: list[str]) -> str | None:
    """Why logprobs do not have the bits of the trainer, whose passes are in bfloat16; None: they have."""
    if config.exactness != "bitwise":
        return "inference.exactness is fast"
    if model.device.type != "cuda":
        return "only logprobs of a GPU are"
    if not isinstance(model, LlamaForward):
        return choices[0]
    if model.dtype is not torch.bfloat16:
        return f"inference.dtype is {config.dtype}"
    if model.recipe.inexact_because is not None:
        return model.recipe.inexact_because
    return None if model.is_exact else why_not_here() or choices[-1]


def _set_exact(llama: LlamaForward, *, is_exact: bool) -> None:
    set_unsplit_products(is_unsplit=is_exact)
    llama.use_exact_products(is_exact=is_exact)


def _plain_call(operation: Callable[[], None]) -> Callable[[], None]:
    return operation


def _captured(
    model: SlotModel, module: Any, capture: Capture | None, choices: list[str]
) -> tuple[SlotModel, Capture | None]:
    """The model whose decode steps can be captured, or the given one without a capture."""
    if capture is None:
        return model, None
    try:
        fixed = model.fixed() if isinstance(model, StateForward) else model
        with _own_stream(model.device):
            error = _least_error(
                module, TOLERANCE[model.dtype], lambda seed: captured_error(fixed, module, capture, seed=seed)
            )
        if error <= TOLERANCE[model.dtype]:
            choices.append(f"decode steps: captured (relative error {error:.1e})")
            return fixed, capture
        reason = f"a captured step has a relative error of {error:.2g}"
    except Exception as raised:  # A module or a capture may raise anything; called directly, the model works.
        if is_out_of_memory(raised):
            raise
        reason = f"{type(raised).__name__}: {raised}"
    if isinstance(model, ModuleForward | StateForward) and (kernels := model.step_kernels) is not None:
        model.step_kernels = None
        found, used = _captured(model, module, capture, choices)
        if used is not None:
            choices.append(f"kernels of captured steps: those of the module, because {reason}")
            return found, used
        # Not because of the kernels.
        model.step_kernels = kernels
        return model, None
    choices.append(f"decode steps: called from Python, because {reason}")
    log.warning("decode steps are not captured, so the engine is as slow as Python: %s", reason)
    return model, None


@contextmanager
def _own_stream(device: torch.device) -> Iterator[None]:
    """On a GPU, another stream than the default, on which no graph can be captured."""
    if device.type != "cuda":
        yield
        return
    before, own = torch.cuda.current_stream(device), torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    own.wait_stream(before)
    with torch.cuda.stream(own):
        yield
    before.wait_stream(own)


def _slot_batch(config: InferenceConfig, model: SlotModel, capture: Capture | None) -> tuple[SlotBatch, Runner]:
    min_prefix = config.prefix_cache_least or CPU_MIN_PREFIX
    budget, prefix_tokens = _budget(config, model, model.device, min_prefix=min_prefix)
    memory = model.new_memory()
    has_kernels = isinstance(model, LlamaForward) and isinstance(model.ops, SlotKernelOps)
    sampler = sample_with_kernels if has_kernels else sample
    runner = (
        Runner(model, memory, max_rows=budget.max_rows, sampler=sampler, draft_tokens=config.draft_tokens)
        if capture is None
        else CapturedRunner(model, memory, max_rows=budget.max_rows, capture=capture, sampler=sampler)
    )
    batch = SlotBatch(
        runner,
        budget=budget,
        round_tokens=config.step_prefill_tokens or CPU_ROUND_TOKENS,
        forward_tokens=config.forward_tokens
        or (GPU_STEP_TOKENS if model.device.type == "cuda" else CPU_FORWARD_TOKENS),
        # A memoized prompt is not computed, so its routes would be missing.
        memo_rows=0 if config.record_routes else int(config.prompt_memo_mb * 1_000_000) // (4 * model.vocab_size),
        has_routes=config.record_routes,
        prefix_tokens=prefix_tokens,
        min_prefix=min_prefix,
    )
    return batch, runner


def _paged_batch(config: InferenceConfig, model: LlamaForward, capture: Capture) -> tuple[PagedBatch, PackedRunner]:
    shape, num_layers, max_rows = model.shapes[0], len(model.shapes), config.max_running
    step_tokens = config.forward_tokens or GPU_STEP_TOKENS
    per_block = BlockCache.bytes_per_block(
        shape, num_layers=num_layers, block_size=BLOCK_SIZE, dtype=model.cache_dtype, routes=model.route_shape
    )
    max_bytes = _cache_bytes(model.device, config.kv_memory_mb)
    allowed, needed = max_bytes // per_block, -(-model.max_model_len // BLOCK_SIZE) + 1
    if allowed < needed:
        raise RunError(
            f"the cache may use {max_bytes / 1e6:.0f} MB, but one sequence of {model.max_model_len} tokens needs "
            f"{needed * per_block / 1e6:.0f}; raise inference.kv_memory_mb or lower inference.max_model_len"
        )
    max_cached = int(allowed * config.prefix_cache_share)
    # More cannot be used.
    limit = min(allowed, max_rows * needed + max_cached + 1)
    first_blocks = limit if config.kv_memory_mb != "auto" else min(limit, max(needed, int(allowed * FIRST_SHARE)))
    cache = BlockCache(
        shape,
        num_layers=num_layers,
        block_size=BLOCK_SIZE,
        max_rows=max_rows,
        max_length=model.max_model_len,
        dtype=model.cache_dtype,
        device=model.device,
        routes=model.route_shape,
    )
    runner = PackedRunner(
        model,
        cache,
        max_rows=max_rows,
        max_tokens=max(step_tokens, max_rows),
        sampler=sample_with_kernels if isinstance(model.packed_ops, KernelOps) else sample,
        capture=capture,
        draft_tokens=config.draft_tokens,
    )
    batch = PagedBatch(
        runner,
        BlockPool(size=BLOCK_SIZE, limit=limit, max_cached=max_cached, pin_s=config.prefix_pin_s),
        max_rows=max_rows,
        prompt_tokens=config.step_prefill_tokens or step_tokens,
        step_tokens=step_tokens,
    )
    if not batch.grow(first_blocks):
        raise RunError(
            f"out of memory: the device has no {first_blocks * per_block / 1e6:.0f} MB left for keys and values; lower "
            "inference.kv_memory_mb, or give the trainer another device"
        )
    return batch, runner


def _budget(
    config: InferenceConfig, model: SlotModel, device: torch.device, *, min_prefix: int
) -> tuple[SlotBudget, int]:
    """The budget of running requests, and the number of positions for the prefix cache: a share of the same memory."""
    per_token, fixed = model.bytes_per_row()
    # A model with recurrent states only takes nothing for a position: then a position is a byte of the fixed part.
    per_token = max(1, per_token)
    row_tokens = -(-fixed // per_token)
    whole_row = model.max_model_len + row_tokens
    max_bytes = _cache_bytes(device, config.kv_memory_mb)
    # The cache has one extra slot as scratch space.
    tokens = max_bytes // per_token - whole_row
    if tokens < whole_row:
        raise RunError(
            f"the cache may use {max_bytes / 1e6:.0f} MB, but one sequence of {model.max_model_len} tokens and a scratch slot need "
            f"{2 * whole_row * per_token / 1e6:.0f}; raise inference.kv_memory_mb or lower inference.max_model_len"
        )
    share = int(tokens * config.prefix_cache_share) if min_prefix < model.max_model_len else 0
    prefix_tokens = min(share, tokens - whole_row)
    budget = SlotBudget(
        max_rows=config.max_running,
        max_length=model.max_model_len,
        max_tokens=tokens - prefix_tokens,
        row_tokens=row_tokens,
    )
    return budget, prefix_tokens


def _cache_bytes(device: torch.device, kv_memory_mb: float | str) -> int:
    """Maximum size of keys and values."""
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
