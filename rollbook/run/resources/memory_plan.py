"""The memory that a run needs, before anything is loaded: by GPU, process and purpose, and of main memory and disk.

Pure arithmetic from the dimensions of the model and the settings. The constants below are measured; `benchmarks.loop.defaults`
compares the plan with the measured peak of each process.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from rollbook.run.resources.model_facts import ModelFacts
from rollbook.trainer.config import LoraSettings
from rollbook.trainer.data.delta_chunks import WORKSPACE_BYTES, workspace_bytes_per_token

GB = 10**9
MB = 10**6

# Measured on an H200 with torch 2.11.
CONTEXT_BYTES = 700 * MB
"""Of a process that uses a GPU: driver context, loaded kernels, cuBLAS workspace."""
MPS_BYTES = 75 * MB
"""Of an MPS server, which loads no kernels; 70 MB measured."""
ALLOCATOR_SHARE = 1.03
"""Tensors of a pass, relative to those that the backward pass needs: gradients of activations and workspaces. The allocator may
reserve more than that from a GPU with free memory; it returns what it does not use when the memory is needed."""
CHUNK_BYTES = 250 * MB
"""Memory of a chunk of the optimizer's state that is not updated where it is stored: its copies and intermediate results."""
PUBLISHED_COPIES = 3
"""Copies of the published weights on the GPU: the next version, the one that servers load, and the one before it."""
GRAPH_BYTES_PER_LAYER = 12 * MB
"""Captured graphs of the engine, all shapes together."""
LOGITS_COPIES = 1.75
"""Peak of the chunk of float32 logits and their gradient, relative to the logits."""
SAMPLER_COPIES = 3.0
"""Peak of the engine's float32 logits during sampling, relative to the logits."""
VLLM_BYTES = 3_000 * MB
"""Of a vLLM server besides weights and cache: context, activations, compiled graphs."""
HEADROOM_SHARE = 0.04
"""Of a GPU, left free: the driver, other small users, and what the plan does not know."""

# Main memory.
TORCH_PROCESS_BYTES = 1200 * MB
PINNED_SHARE = 1.25
"""Size of pinned memory, relative to the tensors in it: torch rounds each one up to a power of two."""
PLAIN_PROCESS_BYTES = 250 * MB
PLAIN_PROCESSES = 4
"""Supervisor, ledger, dispatcher and dashboard."""

# Bytes a parameter.
MASTER, GRADIENT, ADAM = 4, 4, 8
EIGHT_BIT_ADAM = 2 + 2 * 4 / 256
"""The codes of both averages, and a scale of each for a block of 256."""
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
EIGHT_BITS = "8 bits"
"""Type of keys and values that are stored as a byte for each number and one for the exponent of each vector."""

# The smallest sizes that are suggested.
MIN_LOGITS_MB = 64
MIN_RUNNING = 16
MIN_FORWARD = 512
MIN_LONGEST = 256
MAX_LONGEST = 1 << 22
"""Tokens. No model has a longer context."""
ALL_LAYERS = 1 << 16
"""No model has more."""
LEAST_SEQUENCES = 4
"""Of keys and values: with less, requests wait for each other."""

LEAST_LISTED = 50 * MB
"""Smaller parts of a process are not listed in messages."""

MAIN_MEMORY, DISK = "main memory", "disk"
EVALUATION = "evaluation"
Engine = Literal["embedded", "vllm", "none"]
OptimizerState = Literal["device", "host", "8bit"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The settings of a run that decide its memory."""

    trainer_device: str = "cpu"
    compute_dtype: str = "float32"
    lora: LoraSettings | None = None
    optimizer_state: OptimizerState = "device"
    has_reference: bool = False
    tokens_per_pass: int = 16_384
    longest: int = 4096
    """Tokens of the longest sequence: it gets a pass of its own even if the pass size is smaller."""
    checkpointed_layers: int = 0
    """Their activations are recomputed in the backward pass. `ALL_LAYERS`, or any number beyond the model's: all."""
    is_exact: bool = False
    """Whether passes have the bits of the sampler. Their kernels compute the activation of a gate again in the backward pass."""
    logits_bytes: int = 256 << 20
    keep_checkpoints: int = 2
    gpu_copies: int = 0
    """Copies of the published weights on the GPU of the trainer's first rank."""
    has_gpu_checkpoint: bool = False
    """Whether the state of a checkpoint is copied on the GPU."""
    is_merged: bool = False
    """Whether adapters are merged with the base for a publication."""
    has_mapped_weights: bool = False
    """Whether a policy server reads published weights from the trainer's memory, without a copy of its own."""
    trainer_gpus: tuple[int, ...] = (0,)
    """One for each rank. Read if the device is a GPU."""
    engine: Engine = "embedded"
    policy_device: str = "cpu"
    policy_dtype: str = "float32"
    has_byte_cache: bool = False
    """Whether keys and values have 8 bits a number."""
    has_fp8_weights: bool = False
    """Whether the policy's projections have copies with 8 bits a number."""
    has_routes: bool = False
    """Whether the chosen experts are kept with the keys and values."""
    kv_bytes: int = 0
    """0: as much as is left."""
    max_running: int = 256
    forward_tokens: int = 4096
    has_graphs: bool = True
    policy_gpus: tuple[tuple[int, ...], ...] = ((0,),)
    """Those of each replica."""
    vllm_bytes: int = 0
    """What a vLLM server takes of each of its GPUs, whatever it needs. 0: what it needs with `kv_bytes`."""
    has_own_evaluation: bool = False
    """A second policy server for evaluations, on the GPU of the first."""
    is_base_shared: bool = False
    """Whether trainer and policy servers map the frozen base of adapters, which another process owns."""
    has_mps: bool = False
    """Whether an MPS server of the run has a context on each of its GPUs."""
    is_shared_memory: bool = False
    """Whether weights are published through main memory."""
    workers: int = 1

    @property
    def cache_dtype(self) -> str:
        return EIGHT_BITS if self.has_byte_cache else self.policy_dtype


@dataclass(frozen=True, slots=True)
class Part:
    place: str
    """`GPU 0`, `main memory` or `disk`."""
    process: str
    what: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Saving:
    """A change of one setting, and the memory that it saves at a place."""

    setting: str
    value: str
    num_bytes: int

    def __str__(self) -> str:
        return f"{self.setting} = {self.value} saves {sized(self.num_bytes)}"


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    parts: tuple[Part, ...]

    @property
    def places(self) -> list[str]:
        return list(dict.fromkeys(part.place for part in self.parts))

    def total(self, place: str, process: str | None = None) -> int:
        return sum(p.num_bytes for p in self.parts if p.place == place and process in (None, p.process))

    def by_process(self, place: str) -> dict[str, int]:
        found: dict[str, int] = defaultdict(int)
        for part in self.parts:
            if part.place == place:
                found[part.process] += part.num_bytes
        return dict(found)

    def overfull(self, capacity: Mapping[str, int]) -> dict[str, int]:
        """Places that need more than they have, with the missing bytes. Places without a capacity are not checked."""
        missing = {place: self.total(place) - capacity[place] for place in self.places if place in capacity}
        return {place: num_bytes for place, num_bytes in missing.items() if num_bytes > 0}

    def lines(self, place: str) -> list[str]:
        """Each process with its parts, largest first."""
        lines = []
        for process, total in sorted(self.by_process(place).items(), key=lambda item: -item[1]):
            parts = [
                f"{part.what} {part.num_bytes / GB:.1f}"
                for part in sorted(self.parts, key=lambda part: -part.num_bytes)
                if part.place == place and part.process == process and part.num_bytes >= LEAST_LISTED
            ]
            lines.append(f"{process} {total / GB:.1f} ({', '.join(parts)})" if parts else f"{process} {sized(total)}")
        return lines


def sized(num_bytes: int) -> str:
    return f"{num_bytes / GB:.1f} GB" if num_bytes >= LEAST_LISTED else f"{num_bytes / MB:.1f} MB"


def gpu(number: int) -> str:
    return f"GPU {number}"


def memory_plan(model: ModelFacts, sizes: Sizes) -> MemoryPlan:
    parts = [*_trainer_parts(model, sizes), *_policy_parts(model, sizes), *_other_parts(model, sizes)]
    if sizes.has_mps:
        gpus = sorted({part.place for part in parts if part.place not in (MAIN_MEMORY, DISK)})
        parts += [Part(place, "mps", "context", MPS_BYTES) for place in gpus]
    return MemoryPlan(tuple(part for part in parts if part.num_bytes > 0))


def activation_bytes_per_token(model: ModelFacts, sizes: Sizes) -> int:
    """What the backward pass of one token needs: the activations of all layers, but only the inputs of those that it recomputes.
    These are the first ones: when they are recomputed, the activations of the others are freed."""
    # Inputs and outputs of both norms; queries, keys, values and the result of attention; the gate; its activation, unless
    # that is computed again; the up projection, and their product.
    kept_of_gate = 1 if sizes.is_exact and not model.experts else 2
    # Gates of attention: as projected, their sigmoid, and the product with the result.
    of_attention = 2 * model.query_width + 2 * model.key_width + 3 * model.gate_width
    # The projections, and the input of the last one; the chunks are computed again.
    of_delta = sum(model.delta.projections.values()) if model.delta else 0
    of_layer = 4 * model.hidden + (2 + kept_of_gate) * model.intermediate
    checkpointed = min(sizes.checkpointed_layers, model.layers)
    # The activations of at least one layer are needed at a time; they contain its input.
    whole = max(1, model.layers - checkpointed)
    # Kinds of layers alternate; where one layer is whole at a time, each of them is in turn.
    delta = min(whole, -(-whole * model.delta.layers // model.layers)) if model.delta else 0
    of_mixers = max(of_attention, of_delta) if whole == 1 else delta * of_delta + (whole - delta) * of_attention
    values = whole * of_layer + of_mixers + (model.layers - whole) * model.hidden
    return DTYPE_BYTES[sizes.compute_dtype] * (values + 2 * model.hidden)


def row_bytes(model: ModelFacts, dtype: str, length: int, *, has_routes: bool = False) -> int:
    """What the engine's cache keeps of a request with so many tokens. `dtype`: of its numbers. `has_routes`: with the chosen
    experts."""
    kept = sum(layer.num_bytes(1 if dtype == EIGHT_BITS else DTYPE_BYTES[dtype], length) for layer in model.cache)
    kept += 2 * model.kv_heads * len(model.cache) * length if dtype == EIGHT_BITS else 0
    return kept + (length * model.route_bytes_per_token if has_routes else 0)


def pass_bytes(model: ModelFacts, sizes: Sizes) -> int:
    """Activations and logits of a forward and backward pass."""
    tokens = max(sizes.tokens_per_pass, sizes.longest)
    per_token = activation_bytes_per_token(model, sizes)
    logits = min(sizes.logits_bytes, 4 * model.vocabulary * tokens)
    return round(ALLOCATOR_SHARE * (tokens * per_token + LOGITS_COPIES * logits)) + _chunk_bytes(model, tokens)


def _chunk_bytes(model: ModelFacts, tokens: int) -> int:
    """Memory for the chunks of one gated delta layer, which are computed again in the backward pass."""
    delta = model.delta
    if delta is None:
        return 0
    of_key_head = workspace_bytes_per_token(delta.value_heads // delta.key_heads, delta.key_size, delta.value_size)
    return max(tokens * of_key_head, min(WORKSPACE_BYTES, tokens * delta.key_heads * of_key_head))


def trained_parameters(model: ModelFacts, sizes: Sizes) -> int:
    return model.parameters if sizes.lora is None else model.adapter_parameters(sizes.lora)


def published_bytes(model: ModelFacts, sizes: Sizes) -> int:
    """Bytes of one publication. Adapters and merged weights are float32, and so are weights that several ranks gather."""
    if sizes.lora is not None:
        return MASTER * (model.parameters if sizes.is_merged else trained_parameters(model, sizes))
    return (DTYPE_BYTES[sizes.compute_dtype] if _ranks(sizes) == 1 else MASTER) * model.parameters


def _ranks(sizes: Sizes) -> int:
    return len(sizes.trainer_gpus) if sizes.trainer_device == "cuda" else 1


def _trainer_parts(model: ModelFacts, sizes: Sizes) -> Iterator[Part]:
    is_gpu, ranks = sizes.trainer_device == "cuda", _ranks(sizes)
    compute = DTYPE_BYTES[sizes.compute_dtype]
    trained = trained_parameters(model, sizes)
    # Several ranks hold float32 weights, and cast each layer when they gather it.
    untrained = compute if ranks == 1 else MASTER
    shadow = trained if compute < MASTER and ranks == 1 else 0
    frozen = 0 if sizes.lora is None or sizes.is_base_shared else model.parameters
    head = 0 if sizes.lora is not None else model.head_parameters
    shared = {
        "weights": untrained * frozen + compute * shadow,
        "master weights": MASTER * trained,
        "gradients": GRADIENT * trained,
        "optimizer": 0 if sizes.optimizer_state == "host" and is_gpu else _optimizer_bytes(sizes, trained),
        "chunk of the optimizer": CHUNK_BYTES if sizes.optimizer_state != "device" and is_gpu else 0,
        "checkpoint": _gpu_checkpoint_bytes(sizes, trained) if is_gpu else 0,
        "reference": untrained * model.parameters if sizes.has_reference and sizes.lora is None else 0,
    }
    for rank in range(ranks):
        place = gpu(sizes.trainer_gpus[rank]) if is_gpu else MAIN_MEMORY
        process = "trainer" if rank == 0 else f"rank {rank}"
        for what, num_bytes in shared.items():
            yield Part(place, process, what, -(-num_bytes // ranks))
        if rank == 0 and is_gpu:
            yield Part(place, process, "published copies", sizes.gpu_copies * published_bytes(model, sizes))
        if ranks > 1:
            gathered = 2 * (model.layer_parameters + model.head_parameters)
            yield Part(place, process, "gathered layers", compute * gathered)
        # The gradient of the output embedding is summed in float32 and then cast.
        yield Part(place, process, "activations", pass_bytes(model, sizes) + head * (GRADIENT + compute))
        if is_gpu:
            yield Part(place, process, "context", CONTEXT_BYTES)
    if sizes.is_base_shared:
        place = gpu(sizes.trainer_gpus[0]) if is_gpu else MAIN_MEMORY
        yield Part(place, "base", "weights", compute * model.parameters)
        yield Part(place, "base", "context", CONTEXT_BYTES if is_gpu else 0)


def _gpu_checkpoint_bytes(sizes: Sizes, trained: int) -> int:
    if not sizes.has_gpu_checkpoint:
        return 0
    return MASTER * trained + (0 if sizes.optimizer_state == "host" else _optimizer_bytes(sizes, trained))


def _optimizer_bytes(sizes: Sizes, trained: int) -> int:
    return round((EIGHT_BIT_ADAM if sizes.optimizer_state == "8bit" else ADAM) * trained)


def _policy_parts(model: ModelFacts, sizes: Sizes) -> Iterator[Part]:
    if sizes.engine == "none":
        return
    names = ["policy", *(f"policy-{number}" for number in range(1, len(sizes.policy_gpus)))]
    servers = [*zip(names, sizes.policy_gpus, strict=True)]
    if sizes.has_own_evaluation:
        servers.append((EVALUATION, sizes.policy_gpus[0]))
    for name, gpus in servers:
        if sizes.policy_device == "cpu":
            yield from _engine_parts(model, sizes, MAIN_MEMORY, name)
        elif sizes.engine == "vllm":
            for number in gpus:
                yield from _vllm_parts(model, sizes, gpu(number), name, of=len(gpus))
        else:
            yield from _engine_parts(model, sizes, gpu(gpus[0]), name)


def _vllm_parts(model: ModelFacts, sizes: Sizes, place: str, process: str, *, of: int) -> Iterator[Part]:
    """`of`: GPUs among which weights and cache are divided (tensor parallelism)."""
    weights = DTYPE_BYTES[sizes.policy_dtype] * model.parameters // of
    cache = max(least_kv_bytes(model, sizes), sizes.kv_bytes) // of
    yield Part(place, process, "weights", weights)
    yield Part(place, process, "steps and graphs", VLLM_BYTES)
    # It takes its share at the start and fills it with the cache.
    yield Part(place, process, "keys and values", max(cache, sizes.vllm_bytes - weights - VLLM_BYTES))


def _engine_parts(model: ModelFacts, sizes: Sizes, place: str, process: str) -> Iterator[Part]:
    size, is_gpu = DTYPE_BYTES[sizes.policy_dtype], place != MAIN_MEMORY
    # An evaluation's own server loads whole weights.
    is_base_shared = sizes.is_base_shared and process != EVALUATION
    yield Part(place, process, "weights", 0 if is_base_shared else size * model.parameters)
    if sizes.lora is not None and not sizes.is_merged:
        yield Part(place, process, "new weights", 2 * size * trained_parameters(model, sizes))
    elif not (sizes.has_mapped_weights and published_bytes(model, sizes) == size * model.parameters):
        yield Part(place, process, "new weights", size * model.parameters)
    if sizes.has_fp8_weights:
        yield Part(place, process, "8-bit weights", model.layers * model.layer_parameters)
    yield Part(place, process, "keys and values", sizes.kv_bytes)
    if is_gpu:
        tokens = max(sizes.forward_tokens, sizes.max_running)
        widest = model.intermediate * 3 + model.query_width + model.gate_width + 2 * model.key_width + 4 * model.hidden
        logits = SAMPLER_COPIES * 4 * model.vocabulary * sizes.max_running
        graphs = GRAPH_BYTES_PER_LAYER * model.layers if sizes.has_graphs else 0
        yield Part(place, process, "steps", round(size * tokens * widest + logits))
        yield Part(place, process, "graphs", graphs)
        yield Part(place, process, "context", CONTEXT_BYTES)


def _other_parts(model: ModelFacts, sizes: Sizes) -> Iterator[Part]:
    trained, published = trained_parameters(model, sizes), published_bytes(model, sizes)
    state = MASTER * trained + _optimizer_bytes(sizes, trained)
    yield Part(MAIN_MEMORY, "trainer", "process", _ranks(sizes) * TORCH_PROCESS_BYTES)
    if sizes.trainer_device == "cuda":
        if sizes.optimizer_state == "host":
            yield Part(MAIN_MEMORY, "trainer", "optimizer", _optimizer_bytes(sizes, trained))
        yield Part(MAIN_MEMORY, "trainer", "copy for a checkpoint", state)
        # Those of two steps, unless they are on the GPU: then the copy of which the digest is computed.
        pinned = 1 if sizes.gpu_copies else 2
        yield Part(MAIN_MEMORY, "trainer", "pinned weights", round(pinned * PINNED_SHARE * published))
    if sizes.is_base_shared:
        yield Part(MAIN_MEMORY, "base", "process", TORCH_PROCESS_BYTES)
    replicas = 0 if sizes.engine == "none" else len(sizes.policy_gpus)
    yield Part(MAIN_MEMORY, "policy", "process", replicas * TORCH_PROCESS_BYTES)
    # Before the first checkpoint.
    loading = max(0, _loading_bytes(model, sizes) - (state if sizes.trainer_device == "cuda" else 0))
    yield Part(MAIN_MEMORY, "other", "models while they are loaded", loading)
    if sizes.is_shared_memory:
        # The previous one is removed when the next one is confirmed.
        yield Part(MAIN_MEMORY, "trainer", "published weights", 3 * published)
    yield Part(MAIN_MEMORY, "rollout", "workers", sizes.workers * PLAIN_PROCESS_BYTES)
    yield Part(MAIN_MEMORY, "other", "processes", PLAIN_PROCESSES * PLAIN_PROCESS_BYTES)
    # One more while the next one is written.
    yield Part(DISK, "trainer", "checkpoints", (sizes.keep_checkpoints + 1) * state)


def _loading_bytes(model: ModelFacts, sizes: Sizes) -> int:
    """Main memory through which models are loaded to GPUs: mixtures of experts, whose files are converted. A shared base and all
    other models are read weight by weight."""
    if sizes.is_base_shared or not model.experts:
        return 0
    of_trainer = MASTER if sizes.lora is None or _ranks(sizes) > 1 else DTYPE_BYTES[sizes.compute_dtype]
    engines = len(sizes.policy_gpus) if sizes.engine == "embedded" and sizes.policy_device != "cpu" else 0
    trainers = 1 if sizes.trainer_device == "cuda" else 0
    return model.parameters * (trainers * of_trainer + engines * DTYPE_BYTES[sizes.policy_dtype])


def longest_trainable(model: ModelFacts, sizes: Sizes, capacity: Mapping[str, int]) -> int | None:
    """Tokens of the longest sequence that fits into the memory of the trainer, alone in a pass with checkpointing of all layers, to
    which a step that does not fit is split. At least the planned one; None if the memory is unknown."""
    place = gpu(sizes.trainer_gpus[0]) if sizes.trainer_device == "cuda" else MAIN_MEMORY
    if place not in capacity:
        return None

    def is_too_long(tokens: int) -> bool:
        alone = replace(sizes, longest=tokens, tokens_per_pass=tokens, checkpointed_layers=model.layers)
        return memory_plan(model, alone).total(place) > capacity[place]

    return sizes.longest + bisect_left(range(sizes.longest + 1, MAX_LONGEST), True, key=is_too_long)


def savings(
    model: ModelFacts,
    sizes: Sizes,
    place: str,
    *,
    process: str | None = None,
    among: Collection[str] | None = None,
) -> list[Saving]:
    """The changes of one setting that save most at a place, at most three. `process`: what only this one saves counts. `among`: the
    settings that can be changed; None: all."""
    before = memory_plan(model, sizes).total(place, process)
    found = [
        Saving(setting, value, before - memory_plan(model, changed).total(place, process))
        for setting, value, changed in _smaller(model, sizes)
        if among is None or setting in among
    ]
    return sorted((saving for saving in found if saving.num_bytes > 0), key=lambda saving: -saving.num_bytes)[:3]


def _smaller(model: ModelFacts, sizes: Sizes) -> Iterator[tuple[str, str, Sizes]]:
    """Settings with which a run needs less memory: path, value, and the sizes with it. A shared base has one dtype."""
    is_gpu, tokens = sizes.trainer_device == "cuda", max(sizes.longest, sizes.tokens_per_pass // 4)
    shorter = max(MIN_LONGEST, sizes.longest // 2)
    can_store = sizes.optimizer_state == "device" and len(sizes.trainer_gpus) == 1
    cache_mb = -(-least_kv_bytes(model, sizes) // MB)
    changes: list[tuple[bool, str, str, dict[str, Any]]] = [
        (sizes.lora is None, "trainer.lora.rank", "16", {"lora": LoraSettings()}),
        *((can_store, "trainer.optimizer_state", f'"{kind}"', {"optimizer_state": kind}) for kind in ("host", "8bit")),
        (sizes.has_reference, "trainer.kl_coef", "0.0", {"has_reference": False}),
        (is_gpu and not sizes.is_base_shared, "trainer.compute_dtype", '"bfloat16"', {"compute_dtype": "bfloat16"}),
        (
            sizes.policy_device != "cpu" and not sizes.is_base_shared,
            "inference.dtype",
            '"bfloat16"',
            {"policy_dtype": "bfloat16"},
        ),
        (True, "trainer.gradient_checkpointing", "true", {"checkpointed_layers": model.layers}),
        (True, "trainer.max_tokens_per_microbatch", str(tokens), {"tokens_per_pass": tokens}),
        (
            sizes.longest > shorter,
            "rollout.max_total_tokens",
            str(shorter),
            {"longest": shorter},
        ),
        (
            sizes.logits_bytes > MIN_LOGITS_MB << 20,
            "trainer.max_logits_mb",
            str(MIN_LOGITS_MB),
            {"logits_bytes": MIN_LOGITS_MB << 20},
        ),
        (
            sizes.kv_bytes > cache_mb * MB and sizes.engine == "embedded",
            "inference.kv_memory_mb",
            str(cache_mb),
            {"kv_bytes": cache_mb * MB},
        ),
        (
            sizes.gpu_copies > 0,
            "inference.transfer",
            '"shared_memory"',
            {"gpu_copies": 0, "has_mapped_weights": False, "is_shared_memory": True},
        ),
        (
            sizes.has_gpu_checkpoint,
            "trainer.checkpoint_copy",
            '"main_memory"',
            {"has_gpu_checkpoint": False},
        ),
        (
            sizes.forward_tokens > MIN_FORWARD,
            "inference.forward_tokens",
            str(MIN_FORWARD),
            {"forward_tokens": MIN_FORWARD},
        ),
        (sizes.has_fp8_weights, "inference.weights_dtype", '"auto"', {"has_fp8_weights": False}),
        (sizes.max_running > MIN_RUNNING, "inference.max_running", str(MIN_RUNNING), {"max_running": MIN_RUNNING}),
        (sizes.has_own_evaluation, "evaluation.policy", '"shared"', {"has_own_evaluation": False}),
        (sizes.keep_checkpoints > 1, "trainer.keep_checkpoints", "1", {"keep_checkpoints": 1}),
        (sizes.workers > 1, "rollout.workers", "1", {"workers": 1}),
    ]
    for is_possible, setting, value, change in changes:
        if is_possible:
            yield setting, value, replace(sizes, **change)


def least_kv_bytes(model: ModelFacts, sizes: Sizes) -> int:
    """Keys and values of a few sequences."""
    return LEAST_SEQUENCES * row_bytes(model, sizes.cache_dtype, sizes.longest, has_routes=sizes.has_routes)
