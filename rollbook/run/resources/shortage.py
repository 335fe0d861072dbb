"""What a process that ran out of memory reports: what it did, what was planned where it ran out, and the settings that help."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from rollbook.contracts.errors import RunError
from rollbook.run.config.run import LoadedConfig
from rollbook.run.resources.machine import Machine
from rollbook.run.resources.memory_plan import (
    MAIN_MEMORY,
    MB,
    MemoryPlan,
    Saving,
    Sizes,
    gpu,
    memory_plan,
    savings,
)
from rollbook.run.resources.model_facts import ModelFacts, model_facts
from rollbook.run.resources.run_sizes import sizes_of, training_sizes
from rollbook.trainer.config import TrainerConfig
from rollbook.trainer.model_config import ModelConfig
from rollbook.trainer.sft_config import READ_BY_SFT

POLICY_SERVER = "the policy server has no memory"
"""How a policy server refuses an update; the trainer reports it."""
OF_MAIN_MEMORY = ("MemoryError", "DefaultCPUAllocator", "allocate memory")
LEAST_SAVED = 50 * MB
"""Less is not worth a suggestion."""
HINT = " If reserved but unallocated"
"""Starts torch's advice about its allocator, which does not apply here."""
TRAINING = ("trainer", "rank ")
"""Start the lines of a plan that a training without a run needs."""
OF_SFT = {f"trainer.{name}": f"trainer.{name}" for name in READ_BY_SFT if name != "lora"} | {
    "trainer.lora.rank": "trainer.lora.rank",
    "rollout.max_total_tokens": "sft.max_tokens",
}
"""The names of settings in `rollbook sft`, by those in a run."""
OF_COMPARISON = ("trainer.optimizer_state", "trainer.gradient_checkpointing", "trainer.max_tokens_per_microbatch")
"""Settings that can differ in a replay with another loss."""


def shortage(loaded: LoadedConfig, process: str, doing: str, error: BaseException) -> str:
    """For the operator. `process`: its name in the run; `doing`: its activity."""
    text, is_main = _described(doing, error)
    model = model_facts(loaded.config.model, loaded.source_dir)
    if model is None:
        return "\n".join([text, *WITHOUT_PLAN])
    process = "policy" if POLICY_SERVER in text else "trainer" if process.startswith("rank") else process
    sizes = sizes_of(loaded.config, Machine())
    plan = memory_plan(model, sizes)
    place = MAIN_MEMORY if is_main else _place_of(process, sizes, plan)
    limit = None if is_main else _limit_of(loaded, process)
    # What other processes save does not help a process with a limit of its own.
    found = savings(model, sizes, place, process=None if limit is None else process)
    lines = plan.lines(place) + ([] if limit is None else [f"{process} may use {limit}"])
    return "\n".join([text, *_advice(place, lines, found)])


def sft_shortage(
    config: ModelConfig, trainer: TrainerConfig, source_dir: Path, *, longest: int, doing: str, error: BaseException
) -> str:
    """Of `rollbook sft`. `longest`: tokens of its longest demonstration."""
    sizes = training_sizes(trainer, longest=longest)
    return _training_shortage(model_facts(config, source_dir), sizes, OF_SFT, doing=doing, error=error)


def replay_shortage(loaded: LoadedConfig, *, doing: str, error: BaseException, is_comparison: bool) -> str:
    """Of `rollbook replay`. `is_comparison`: with other settings, so that some can be changed."""
    sizes = training_sizes(loaded.config.trainer, longest=sizes_of(loaded.config, Machine()).longest)
    settings = {name: f"--set {name}" for name in OF_COMPARISON} if is_comparison else {}
    sizes = replace(sizes, trainer_gpus=(0,), keep_checkpoints=0)
    facts = model_facts(loaded.config.model, loaded.source_dir)
    return _training_shortage(facts, sizes, settings, doing=doing, error=error)


def _training_shortage(
    model: ModelFacts | None, sizes: Sizes, settings: Mapping[str, str], *, doing: str, error: BaseException
) -> str:
    text, is_main = _described(doing, error)
    if model is None:
        return "\n".join([text, *WITHOUT_PLAN])
    sizes = replace(sizes, longest=min(sizes.longest, model.context or sizes.longest))
    place = MAIN_MEMORY if is_main or sizes.trainer_device == "cpu" else gpu(sizes.trainer_gpus[0])
    lines = [line for line in memory_plan(model, sizes).lines(place) if line.startswith(TRAINING)]
    return "\n".join([text, *_advice(place, lines, _renamed(savings(model, sizes, place, among=settings), settings))])


def sft_savings(model: ModelFacts, sizes: Sizes, place: str) -> list[Saving]:
    """The changes of a file of `rollbook sft` that save most."""
    return _renamed(savings(model, sizes, place, among=OF_SFT), OF_SFT)


def _renamed(found: list[Saving], settings: Mapping[str, str]) -> list[Saving]:
    return [Saving(settings[saving.setting], saving.value, saving.num_bytes) for saving in found]


WITHOUT_PLAN = ["  Free some memory, or set smaller sizes: docs/gpu.md lists them."]


def _described(doing: str, error: BaseException) -> tuple[str, bool]:
    """What happened, and whether main memory is full."""
    detail = str(error).partition(HINT)[0] or type(error).__name__
    text = detail if isinstance(error, RunError) else f"out of memory while {doing or 'starting'}: {detail}"
    return text, isinstance(error, MemoryError) or any(sign in detail for sign in OF_MAIN_MEMORY)


def _advice(place: str, lines: list[str], found: list[Saving]) -> list[str]:
    helping = [f"    {saving}" for saving in found if saving.num_bytes >= LEAST_SAVED]
    return [
        f"  planned for {place}, in GB:",
        *(f"    {line}" for line in lines),
        f"  Free some memory there{', or change a setting:' if helping else '.'}",
        *helping,
    ]


def _place_of(process: str, sizes: Sizes, plan: MemoryPlan) -> str:
    gpus = [gpu(number) for number in (*sizes.trainer_gpus, *(n for group in sizes.policy_gpus for n in group))]
    return next((place for place in gpus if plan.total(place, process)), MAIN_MEMORY)


def _limit_of(loaded: LoadedConfig, process: str) -> str | None:
    """The limit of the process, and the setting."""
    config, section = loaded.config, "trainer" if process == "trainer" else "inference"
    found = config.trainer.gpu_memory_gb if process == "trainer" else config.inference.gpu_memory_gb
    return None if found is None else f"{found:g} ({section}.gpu_memory_gb)"
