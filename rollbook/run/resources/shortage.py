"""What a process that ran out of memory reports: what it did, what was planned where it ran out, and the settings that help."""

from rollbook.contracts.errors import RunError
from rollbook.run.config.run import LoadedConfig
from rollbook.run.resources.automatic import sizes_of
from rollbook.run.resources.machine import Machine
from rollbook.run.resources.memory_plan import MAIN_MEMORY, MB, MemoryPlan, Sizes, gpu, memory_plan, savings
from rollbook.run.resources.model_facts import model_facts

POLICY_SERVER = "the policy server has no memory"
"""How a policy server refuses an update; the trainer reports it."""
OF_MAIN_MEMORY = ("MemoryError", "DefaultCPUAllocator", "allocate memory")
LEAST_SAVED = 50 * MB
"""Less is not worth a suggestion."""
HINT = " If reserved but unallocated"
"""Starts torch's advice about its allocator, which does not apply here."""


def shortage(loaded: LoadedConfig, process: str, doing: str, error: BaseException) -> str:
    """For the operator. `process`: its name in the run; `doing`: its activity."""
    detail = str(error).partition(HINT)[0] or type(error).__name__
    text = detail if isinstance(error, RunError) else f"out of memory while {doing or 'starting'}: {detail}"
    is_main = isinstance(error, MemoryError) or any(sign in detail for sign in OF_MAIN_MEMORY)
    return "\n".join([text, *_advice(loaded, "policy" if POLICY_SERVER in detail else process, is_main=is_main)])


def _advice(loaded: LoadedConfig, process: str, *, is_main: bool) -> list[str]:
    model = model_facts(loaded.config.model, loaded.source_dir)
    if model is None:
        return ["  Free some memory, or set smaller sizes: docs/gpu.md lists them."]
    sizes = sizes_of(loaded.config, Machine())
    plan = memory_plan(model, sizes)
    place = MAIN_MEMORY if is_main else _place_of(process, sizes, plan)
    found = savings(model, sizes, place, process=process if _is_limited(loaded, process) else None)
    helping = [f"    {saving}" for saving in found if saving.num_bytes >= LEAST_SAVED]
    return [
        f"  planned for {place}, in GB:",
        *(f"    {line}" for line in plan.lines(place)),
        f"  Free some memory there{', or change a setting:' if helping else '.'}",
        *helping,
    ]


def _place_of(process: str, sizes: Sizes, plan: MemoryPlan) -> str:
    gpus = [gpu(number) for number in (*sizes.trainer_gpus, *(n for group in sizes.policy_gpus for n in group))]
    return next((place for place in gpus if plan.total(place, process)), MAIN_MEMORY)


def _is_limited(loaded: LoadedConfig, process: str) -> bool:
    """What other processes save does not help a process with a limit of its own."""
    section = loaded.config.trainer if process == "trainer" else loaded.config.inference
    return section.gpu_memory_gb is not None
