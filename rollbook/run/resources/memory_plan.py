"""The memory that a run needs, before anything is loaded: by GPU, process and purpose, and of main memory and disk.

Pure arithmetic from the dimensions of the model and the settings. The constants below are measured; `benchmarks.loop.defaults`
compares the plan with the measured peak of each process.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from rollbook.run.resources.model_facts import ModelFacts
from rollbook.trainer.config import LoraSettings

GB = 10**9
MB = 10**6

# Measured on an H200 with torch 2.11.
CONTEXT_BYTES = 700 * MB
"""Of a process that uses a GPU: driver context, loaded kernels, cuBLAS workspace."""
ALLOCATOR_SHARE = 1.03
"""Tensors of a pass, relative to those that the backward pass needs: gradients of activations and workspaces. The allocator may
reserve more than that from a GPU with free memory; it returns what it does not use when the memory is needed."""
PUBLISHED_COPIES = 3
"""Copies of the trained weights on the GPU, in the dtype of the passes: the next version, the one that servers load, and one they
still map. Copies that do not fit are made in main memory."""
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
PLAIN_PROCESS_BYTES = 250 * MB
PLAIN_PROCESSES = 4
"""Supervisor, ledger, dispatcher and dashboard."""

# Bytes a parameter.
MASTER, GRADIENT, ADAM = 4, 4, 8
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

# The smallest sizes that are suggested.
MIN_LOGITS_MB = 64
MIN_RUNNING = 16
MIN_LONGEST = 256
LEAST_SEQUENCES = 4
"""Of keys and values: with less, requests wait for each other."""

MAIN_MEMORY, DISK = "main memory", "disk"
Engine = Literal["embedded", "vllm", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The settings of a run that decide its memory."""

    trainer_device: str = "cpu"
    compute_dtype: str = "float32"
    lora: LoraSettings | None = None
    has_reference: bool = False
    tokens_per_pass: int = 16_384
    longest: int = 4096
    """Tokens of the longest sequence: it gets a pass of its own even if the pass size is smaller."""
    is_checkpointing: bool = False
    logits_bytes: int = 256 << 20
    keep_checkpoints: int = 2
    gpu_copies: int = 0
    """Copies of the trained weights on the trainer's GPU, for publications."""
    trainer_gpus: tuple[int, ...] = (0,)
    """One for each rank. Read if the device is a GPU."""
    engine: Engine = "embedded"
    policy_device: str = "cpu"
    policy_dtype: str = "float32"
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
    is_shared_memory: bool = False
    """Whether weights are published through main memory."""
    workers: int = 1


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
        return f"{self.setting} = {self.value} saves {self.num_bytes / GB:.1f} GB"


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
        return [
            f"{process} {total / GB:.1f} ("
            + ", ".join(
                f"{part.what} {part.num_bytes / GB:.1f}"
                for part in sorted(self.parts, key=lambda part: -part.num_bytes)
                if part.place == place and part.process == process and part.num_bytes >= 50 * MB
            )
            + ")"
            for process, total in sorted(self.by_process(place).items(), key=lambda item: -item[1])
        ]


def gpu(number: int) -> str:
    return f"GPU {number}"


def memory_plan(model: ModelFacts, sizes: Sizes) -> MemoryPlan:
    parts = [*_trainer_parts(model, sizes), *_policy_parts(model, sizes), *_other_parts(model, sizes)]
    return MemoryPlan(tuple(part for part in parts if part.num_bytes > 0))


def activation_bytes_per_token(model: ModelFacts, *, dtype: str, is_checkpointing: bool) -> int:
    """What the backward pass of one token needs: of all layers, or of one layer and the inputs of the others."""
    # Inputs and outputs of both norms; queries, keys, values and the result of attention; the gate before and after its activation,
    # the up projection, and their product.
    of_layer = 4 * model.hidden + 2 * model.query_width + 2 * model.key_width + 4 * model.intermediate
    values = of_layer + model.layers * model.hidden if is_checkpointing else model.layers * of_layer
    return DTYPE_BYTES[dtype] * (values + 2 * model.hidden)


def kv_bytes_per_token(model: ModelFacts, dtype: str) -> int:
    return DTYPE_BYTES[dtype] * model.kv_values_per_token


def pass_bytes(model: ModelFacts, sizes: Sizes) -> int:
    """Activations and logits of a forward and backward pass."""
    tokens = max(sizes.tokens_per_pass, sizes.longest)
    per_token = activation_bytes_per_token(model, dtype=sizes.compute_dtype, is_checkpointing=sizes.is_checkpointing)
    logits = min(sizes.logits_bytes, 4 * model.vocabulary * tokens)
    return round(ALLOCATOR_SHARE * (tokens * per_token + LOGITS_COPIES * logits))


def _trainer_parts(model: ModelFacts, sizes: Sizes) -> Iterator[Part]:
    is_gpu = sizes.trainer_device == "cuda"
    ranks = len(sizes.trainer_gpus) if is_gpu else 1
    compute = DTYPE_BYTES[sizes.compute_dtype]
    trained = model.parameters if sizes.lora is None else model.adapter_parameters(sizes.lora)
    frozen = 0 if sizes.lora is None else model.parameters
    is_mixed = compute < MASTER
    head = 0 if sizes.lora is not None else model.head_parameters
    shared = {
        "weights": compute * (frozen + (trained if is_mixed else 0)),
        "master weights": MASTER * trained,
        "gradients": GRADIENT * trained,
        "optimizer": ADAM * trained,
        "published copies": sizes.gpu_copies * (compute if sizes.lora is None else MASTER) * trained if is_gpu else 0,
        "reference": compute * model.parameters if sizes.has_reference and sizes.lora is None else 0,
    }
    for rank in range(ranks):
        place = gpu(sizes.trainer_gpus[rank]) if is_gpu else MAIN_MEMORY
        process = "trainer" if rank == 0 else f"rank {rank}"
        for what, num_bytes in shared.items():
            yield Part(place, process, what, -(-num_bytes // ranks))
        if ranks > 1:
            gathered = 2 * (model.layer_parameters + model.head_parameters)
            yield Part(place, process, "gathered layers", compute * gathered)
        # The gradient of the output embedding is summed in float32 and then cast.
        yield Part(place, process, "activations", pass_bytes(model, sizes) + head * (GRADIENT + compute))
        if is_gpu:
            yield Part(place, process, "context", CONTEXT_BYTES)


def _policy_parts(model: ModelFacts, sizes: Sizes) -> Iterator[Part]:
    if sizes.engine == "none":
        return
    names = ["policy", *(f"policy-{number}" for number in range(1, len(sizes.policy_gpus)))]
    servers = [*zip(names, sizes.policy_gpus, strict=True)]
    if sizes.has_own_evaluation:
        servers.append(("evaluation", sizes.policy_gpus[0]))
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
    yield Part(place, process, "weights", size * model.parameters)
    staged = model.parameters if sizes.lora is None else 2 * model.adapter_parameters(sizes.lora)
    yield Part(place, process, "new weights", size * staged)
    yield Part(place, process, "keys and values", sizes.kv_bytes)
    if is_gpu:
        tokens = max(sizes.forward_tokens, sizes.max_running)
        widest = model.intermediate * 3 + model.query_width + 2 * model.key_width + 4 * model.hidden
        logits = SAMPLER_COPIES * 4 * model.vocabulary * sizes.max_running
        graphs = GRAPH_BYTES_PER_LAYER * model.layers if sizes.has_graphs else 0
        yield Part(place, process, "steps", round(size * tokens * widest + logits))
        yield Part(place, process, "graphs", graphs)
        yield Part(place, process, "context", CONTEXT_BYTES)


def _other_parts(model: ModelFacts, sizes: Sizes) -> Iterator[Part]:
    trained = model.parameters if sizes.lora is None else model.adapter_parameters(sizes.lora)
    state = (MASTER + ADAM) * trained
    yield Part(MAIN_MEMORY, "trainer", "process", TORCH_PROCESS_BYTES)
    if sizes.trainer_device == "cuda":
        yield Part(MAIN_MEMORY, "trainer", "copy for a checkpoint", state)
    replicas = 0 if sizes.engine == "none" else len(sizes.policy_gpus)
    yield Part(MAIN_MEMORY, "policy", "process", replicas * TORCH_PROCESS_BYTES)
    if sizes.is_shared_memory:
        size = DTYPE_BYTES[sizes.compute_dtype]
        yield Part(
            MAIN_MEMORY, "trainer", "published weights", 2 * size * (model.parameters if not sizes.lora else trained)
        )
    yield Part(MAIN_MEMORY, "rollout", "workers", sizes.workers * PLAIN_PROCESS_BYTES)
    yield Part(MAIN_MEMORY, "other", "processes", PLAIN_PROCESSES * PLAIN_PROCESS_BYTES)
    # One more while the next one is written.
    yield Part(DISK, "trainer", "checkpoints", (sizes.keep_checkpoints + 1) * state)


def savings(model: ModelFacts, sizes: Sizes, place: str) -> list[Saving]:
    """The changes of one setting that save most at a place, at most three."""
    before = memory_plan(model, sizes).total(place)
    found = [
        Saving(setting, value, before - memory_plan(model, changed).total(place))
        for setting, value, changed in _smaller(model, sizes)
    ]
    return sorted((saving for saving in found if saving.num_bytes > 0), key=lambda saving: -saving.num_bytes)[:3]


def _smaller(model: ModelFacts, sizes: Sizes) -> Iterator[tuple[str, str, Sizes]]:
    """Settings with which a run needs less memory: path, value, and the sizes with it."""
    is_gpu, tokens = sizes.trainer_device == "cuda", max(sizes.longest, sizes.tokens_per_pass // 4)
    shorter = max(MIN_LONGEST, sizes.longest // 2)
    cache_mb = -(-least_kv_bytes(model, sizes) // MB)
    changes: list[tuple[bool, str, str, dict[str, Any]]] = [
        (sizes.lora is None, "trainer.lora.rank", "16", {"lora": LoraSettings()}),
        (sizes.has_reference, "trainer.kl_coef", "0.0", {"has_reference": False}),
        (is_gpu, "trainer.compute_dtype", '"bfloat16"', {"compute_dtype": "bfloat16"}),
        (sizes.policy_device != "cpu", "inference.dtype", '"bfloat16"', {"policy_dtype": "bfloat16"}),
        (not sizes.is_checkpointing, "trainer.gradient_checkpointing", "true", {"is_checkpointing": True}),
        (True, "trainer.max_tokens_per_microbatch", str(tokens), {"tokens_per_pass": tokens}),
        (
            sizes.longest > shorter,
            "rollout.max_total_tokens",
            str(shorter),
            {"longest": shorter, "tokens_per_pass": min(sizes.tokens_per_pass, shorter)},
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
    return LEAST_SEQUENCES * sizes.longest * kv_bytes_per_token(model, sizes.policy_dtype)
