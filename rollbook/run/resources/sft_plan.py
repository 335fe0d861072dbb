"""Chooses what a file of `rollbook sft` leaves open: device, precision, threads, and sizes with which it fits on its GPUs.

What is chosen becomes part of the recorded configuration, so that a resumed training uses it too.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from rollbook.run.config.run import ConfigFault
from rollbook.run.config.sft import LoadedSftConfig
from rollbook.run.resources.automatic import (
    GPU_PASS_COST,
    TRAINER_THREADS,
    checkpointing_of,
    does_not_fit,
    gpu_capacity,
    gpu_lines,
    precision_of,
    trainer_line,
)
from rollbook.run.resources.faults import no_gpu
from rollbook.run.resources.machine import GB, Machine
from rollbook.run.resources.memory_plan import CONTEXT_BYTES, MemoryPlan, Sizes, gpu, memory_plan
from rollbook.run.resources.model_facts import ModelFacts, model_facts
from rollbook.run.resources.run_sizes import training_sizes
from rollbook.run.resources.shortage import sft_savings
from rollbook.run.resources.size_choice import Demand, choose_sizes
from rollbook.trainer.config import SPLIT_SETTINGS, TrainerConfig

CHOSEN = ("device", "compute_dtype", "threads", "pass_cost_tokens", "max_logits_mb", "gpu_memory_gb", *SPLIT_SETTINGS)
"""Settings of `[trainer]`; a resumed training keeps them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SftResolution:
    loaded: LoadedSftConfig
    machine: Machine
    chosen: Mapping[str, object] = field(default_factory=dict)
    """By path."""
    notes: tuple[str, ...] = ()
    model: ModelFacts | None = None
    sizes: Sizes | None = None
    plan: MemoryPlan | None = None
    """None on a CPU, and if the dimensions of the model are unknown: then passes are measured when the model is loaded."""
    capacity: Mapping[str, int] = field(default_factory=dict)

    missing: tuple[ConfigFault, ...] = ()
    """GPUs of the configuration that this machine does not have."""

    def faults(self) -> list[ConfigFault]:
        """Why it cannot start on this machine."""
        if self.missing:
            return list(self.missing)
        if self.plan is None or self.model is None or self.sizes is None:
            return []
        return [
            ConfigFault(
                "model",
                does_not_fit(
                    self.plan, place, missing, self.capacity[place], sft_savings(self.model, self.sizes, place)
                ),
            )
            for place, missing in self.plan.overfull(self.capacity).items()
        ]

    def lines(self) -> list[str]:
        """For people."""
        lines = [trainer_line(self.loaded.config.trainer)]
        return lines if self.plan is None else [*lines, *gpu_lines(self.plan, self.machine, self.capacity)]


def resolve_sft(loaded: LoadedSftConfig, machine: Machine, *, recorded: TrainerConfig | None = None) -> SftResolution:
    """`recorded`: the settings of the training that is resumed. What was chosen for it is not chosen again."""
    found = _resolved(loaded, machine, recorded)
    before, after = loaded.config.trainer.model_fields_set, found.loaded.config.trainer
    chosen = {f"trainer.{name}": getattr(after, name) for name in CHOSEN if name in after.model_fields_set - before}
    return replace(found, chosen=chosen, missing=missing_gpus(after, machine, is_resumed=recorded is not None))


def missing_gpus(trainer: TrainerConfig, machine: Machine, *, is_resumed: bool) -> tuple[ConfigFault, ...]:
    """What is wrong with the device or the ranks of a training on this machine."""
    if trainer.device != "cuda":
        return ()
    if not machine.gpus:
        return (no_gpu("trainer.device", trainer.device, machine, is_resumed=is_resumed),)
    if trainer.ranks > (have := len(machine.gpus)):
        text = f"is {trainer.ranks}, and each rank needs a GPU, but this machine has {have}. Lower it."
        return (ConfigFault("trainer.ranks", text),)
    return ()


def _resolved(loaded: LoadedSftConfig, machine: Machine, recorded: TrainerConfig | None) -> SftResolution:
    if recorded is not None:
        kept = {name: getattr(recorded, name) for name in CHOSEN if name in recorded.model_fields_set}
        return SftResolution(loaded=_with_open(loaded, kept), machine=machine)
    trainer = loaded.config.trainer
    if not machine.gpus or (trainer.device == "cpu" and "device" in trainer.model_fields_set):
        return SftResolution(loaded=loaded, machine=machine)
    threads = max(1, min(TRAINER_THREADS, machine.cores // 2))
    values = {"device": "cuda", "compute_dtype": precision_of(machine.gpus), "threads": threads}
    loaded = _with_open(loaded, {**values, "pass_cost_tokens": GPU_PASS_COST})
    model = model_facts(loaded.config.model, loaded.source_dir, may_download=True)
    if model is None or loaded.config.trainer.ranks > len(machine.gpus):
        return SftResolution(loaded=loaded, machine=machine)
    return _planned(loaded, machine, model)


def _planned(loaded: LoadedSftConfig, machine: Machine, model: ModelFacts) -> SftResolution:
    config, trainer = loaded.config, loaded.config.trainer
    longest = min(config.sft.max_tokens, model.context or config.sft.max_tokens)
    sizes = training_sizes(trainer, longest=longest)
    capacity = gpu_capacity(machine, config.run.gpu_memory_gb)
    capacity = {gpu(number): capacity[gpu(number)] for number in sizes.trainer_gpus}
    names = {
        "max_tokens_per_microbatch": "tokens_per_pass",
        "gradient_checkpointing": "checkpointed_layers",
        "max_logits_mb": "logits_bytes",
    }
    free = frozenset(size for name, size in names.items() if name not in trainer.model_fields_set)
    step_tokens = config.sft.examples_per_step * longest
    sizes = choose_sizes(model, sizes, free, capacity, Demand(kv_bytes=0, step_tokens=step_tokens))
    values: dict[str, object] = {
        "max_tokens_per_microbatch": sizes.tokens_per_pass,
        "gradient_checkpointing": checkpointing_of(model, sizes),
        "max_logits_mb": sizes.logits_bytes >> 20,
    }
    if config.run.gpu_memory_gb is not None:
        values["gpu_memory_gb"] = round((min(capacity.values()) - CONTEXT_BYTES) / GB, 2)
    return SftResolution(
        loaded=_with_open(loaded, values),
        machine=machine,
        model=model,
        sizes=sizes,
        plan=MemoryPlan(tuple(part for part in memory_plan(model, sizes).parts if part.place in capacity)),
        capacity=capacity,
    )


def _with_open(loaded: LoadedSftConfig, values: Mapping[str, object]) -> LoadedSftConfig:
    """With values for settings that the file leaves open."""
    named = loaded.config.trainer.model_fields_set
    return loaded.with_trainer({name: value for name, value in values.items() if name not in named})
