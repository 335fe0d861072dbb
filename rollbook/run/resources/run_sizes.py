"""What a run needs, by its settings: sizes for the memory plan, lengths, and the GPUs of its processes."""

from dataclasses import replace
from typing import Any

from rollbook.inference.config import InferenceConfig
from rollbook.run.config.run import RunConfig
from rollbook.run.policy_clients import chosen_transfer, reachable
from rollbook.run.resources.machine import Machine
from rollbook.run.resources.memory_plan import ALL_LAYERS, PUBLISHED_COPIES, Sizes, row_bytes
from rollbook.run.resources.model_facts import ModelFacts
from rollbook.run.resources.size_choice import Demand
from rollbook.trainer.config import TrainerConfig

BLOCK = 16
"""Tokens of a block of the engine's cache."""
STEP_TOKENS = 4096
"""Tokens of a forward of the engine on a GPU, unless it is set."""
GPU_TRANSFERS = ("cuda_ipc", "nccl")
"""Transports that keep copies on the trainer's GPU."""
VLLM_SHARE = 0.9
"""vLLM's default."""


def episodes_in_flight(config: RunConfig) -> int:
    return config.gate.max_groups_in_flight * config.rollout.episodes_per_group


def longest_sequence(config: RunConfig, model: ModelFacts | None) -> int:
    longest = config.rollout.max_total_tokens if not config.tasks.is_posted else config.inference.max_model_len or 0
    return min(longest or 4096, (model.context if model is not None else None) or longest or 4096)


def demand_of(config: RunConfig, model: ModelFacts, sizes: Sizes) -> Demand:
    rows = min(sizes.max_running, -(-episodes_in_flight(config) // max(1, len(sizes.policy_gpus))))
    length = (config.inference.max_model_len or sizes.longest) + BLOCK
    # One row more: the engine has a slot for padding.
    cache = (rows + 1) * row_bytes(model, sizes.cache_dtype, length, has_routes=sizes.has_routes)
    per_step = config.gate.groups_per_step * config.rollout.completions_per_prompt
    return Demand(
        kv_bytes=round(cache / (1 - config.inference.prefix_cache_share)), step_tokens=per_step * sizes.longest
    )


def sizes_of(config: RunConfig, machine: Machine) -> Sizes:
    """The settings that decide the memory of a run."""
    trainer, inference, resources = config.trainer, config.inference, config.resources
    ranks = tuple(range(max(1, trainer.ranks - config.cluster.ranks)))
    policy = [resources.of_replica(number, inference.replicas) for number in range(inference.replicas)]
    default = number_of(inference.device)
    kv = inference.kv_memory_mb
    engine = engine_of(inference)
    policy_gpus = tuple(gpus or (default,) for gpus in policy)
    vllm_bytes = 0
    if engine == "vllm" and inference.device != "cpu":
        first = next((g for g in machine.gpus if g.number == policy_gpus[0][0]), None)
        trainer_gpus = resources.trainer_gpus or ranks
        is_alone = policy_gpus[0][0] not in trainer_gpus and config.run.gpu_memory_gb is None
        share = inference.vllm.gpu_memory_share or (VLLM_SHARE if is_alone else 0)
        vllm_bytes = 0 if first is None else round(share * first.memory_bytes)
    shares_gpu = not (resources.are_separate or config.cluster.has_members)
    transfer = chosen_transfer(reachable(config), trainer.device, shares_gpu=shares_gpu)
    training = training_sizes(trainer, longest=longest_sequence(config, None))
    step_tokens = config.gate.groups_per_step * config.rollout.completions_per_prompt * training.longest
    return replace(
        training,
        tokens_per_pass=training.tokens_per_pass
        if config.tasks.is_posted
        else min(training.tokens_per_pass, step_tokens),
        gpu_copies=PUBLISHED_COPIES if transfer in GPU_TRANSFERS else 0,
        is_merged=trainer.lora is not None and inference.publish == "full",
        has_mapped_weights=transfer == "cuda_ipc",
        trainer_gpus=resources.trainer_gpus or ranks,
        engine=engine,
        policy_device=inference.device,
        policy_dtype=inference.dtype,
        has_byte_cache=inference.kv_dtype != "auto",
        has_fp8_weights=inference.weights_dtype != "auto",
        kv_bytes=0 if isinstance(kv, str) else round(kv * 10**6),
        max_running=inference.max_running,
        forward_tokens=inference.forward_tokens or STEP_TOKENS,
        has_graphs=inference.capture_steps,
        has_routes=inference.record_routes,
        policy_gpus=policy_gpus,
        vllm_bytes=vllm_bytes,
        has_own_evaluation=config.evaluation.every_steps is not None and config.evaluation.policy == "own",
        is_base_shared=resources.shared_base,
        has_mps=bool(resources.mps),
        is_shared_memory=engine != "none" and transfer == "shared_memory",
        workers=config.rollout.workers,
    )


def training_sizes(trainer: TrainerConfig, *, longest: int) -> Sizes:
    """The settings that decide the memory of a trainer alone, as in `rollbook sft` and `rollbook replay`."""
    return Sizes(
        trainer_device=trainer.device,
        compute_dtype=trainer.compute_dtype,
        lora=trainer.lora,
        optimizer_state=trainer.optimizer_state,
        has_reference=trainer.kl_coef > 0,
        tokens_per_pass=trainer.tokens_per_pass,
        longest=longest,
        checkpointed_layers=ALL_LAYERS if trainer.gradient_checkpointing is True else trainer.gradient_checkpointing,
        is_exact=trainer.wants_exact_passes,
        logits_bytes=trainer.logits_bytes,
        keep_checkpoints=trainer.keep_checkpoints,
        has_gpu_checkpoint=trainer.checkpoint_copy == "gpu" and not trainer.is_sharded,
        trainer_gpus=tuple(range(trainer.ranks)),
        engine="none",
        workers=0,
    )


def engine_of(inference: InferenceConfig) -> Any:
    if inference.urls or inference.engine == "scripted":
        return "none"
    return "vllm" if inference.engine == "vllm" else "embedded"


def number_of(device: str) -> int:
    _, _, number = device.partition(":")
    return int(number) if number.isdigit() else 0


def gpus_of(config: RunConfig) -> set[int]:
    """Numbers of the GPUs that processes of the run on this machine use."""
    used, resources = set[int](), config.resources
    if config.trainer.device == "cuda":
        used |= set(resources.trainer_gpus or range(max(1, config.trainer.ranks - config.cluster.ranks)))
    if config.inference.device not in ("cpu", "mps") and engine_of(config.inference) != "none":
        used |= set(resources.policy_gpus or (number_of(config.inference.device),))
    return used
