"""Chooses the settings that a run file leaves open, once, at the start of a run: devices, precisions, threads, workers, sizes.

The chosen values become part of the run's recorded configuration, so that a resumed run uses the same ones, even elsewhere.
Without a GPU they are the defaults of the config classes.
"""

import os
import shutil
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rollbook.run.config.run import AUTO_SETTINGS, ConfigFault, LoadedConfig, RunConfig
from rollbook.run.directory import model_directory
from rollbook.run.policy_clients import chosen_transfer, reachable
from rollbook.run.resources.division import best_division, division_of, numbers
from rollbook.run.resources.faults import (
    base_faults,
    machine_faults,
    mps_faults,
    route_faults,
    why_no_mps,
    why_no_mps_here,
)
from rollbook.run.resources.machine import GB, Gpu, Machine
from rollbook.run.resources.memory_plan import (
    CONTEXT_BYTES,
    DISK,
    HEADROOM_SHARE,
    MAIN_MEMORY,
    MB,
    MemoryPlan,
    Saving,
    Sizes,
    gpu,
    longest_trainable,
    memory_plan,
    savings,
    sized,
)
from rollbook.run.resources.model_facts import ModelFacts, model_facts
from rollbook.run.resources.mps import OPTIONAL_MPS, mps_lines, other_server, without_mps
from rollbook.run.resources.run_sizes import (
    BLOCK,
    GPU_TRANSFERS,
    demand_of,
    engine_of,
    episodes_in_flight,
    gpus_of,
    longest_sequence,
    sizes_of,
)
from rollbook.run.resources.shared_base import why_not_shared, why_not_worth_it
from rollbook.run.resources.size_choice import choose_sizes
from rollbook.trainer.config import TrainerConfig

MIN_GPU_PARAMETERS = 5_000_000
"""A smaller model is not faster on a GPU: starting its kernels takes longer than running them on a CPU."""
MAX_WORKERS, TRAINER_THREADS = 8, 4
RUNNING_BUCKETS = (64, 128, 256, 384, 512, 768, 1024)
GPU_PASS_COST = 8192
CPU_PASSES = (8192, 4096, 2048, 1024)
TURNS = "trainer and policy servers take turns on the GPU"
AGENTS_PER_CORE = 4
"""Coding agents that run at the same time: each takes seconds of processor time to start, and waits for the policy afterwards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolution:
    """A configuration with all settings chosen, what was chosen, and its memory plan."""

    loaded: LoadedConfig
    chosen: Mapping[str, Any]
    """By path; only settings whose value differs from the default of its config class."""
    machine: Machine
    model: ModelFacts | None
    sizes: Sizes
    plan: MemoryPlan | None
    """None if the dimensions of the model are unknown."""
    capacity: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    missing: tuple[ConfigFault, ...] = ()
    """Devices and programs of the configuration that this machine does not have."""

    def faults(self, *, needs_machine: bool = True) -> list[ConfigFault]:
        """Why the run cannot start on this machine. `needs_machine`: False if it may be started on another one, with
        other devices and programs."""
        faults = list(self.missing) if needs_machine else []
        faults += base_faults(self.loaded, self.sizes)
        faults += mps_faults(self.loaded.config, self.machine, self.sizes, needs_machine=needs_machine)
        if self.plan is None or self.model is None:
            return faults
        faults += route_faults(self.loaded.config, self.model)
        for place, missing in self.plan.overfull(self.capacity).items():
            advice = savings(self.model, self.sizes, place)
            name = "trainer.keep_checkpoints" if place == DISK else "model"
            faults.append(ConfigFault(name, does_not_fit(self.plan, place, missing, self.capacity[place], advice)))
        return faults

    def lines(self) -> list[str]:
        """What was chosen, and the memory plan of each GPU, for people."""
        config = self.loaded.config
        trainer, inference, rollout = config.trainer, config.inference, config.rollout
        if trainer.device == "cpu" and inference.device == "cpu":
            threads, workers = _count(trainer.threads, "thread"), _count(rollout.workers, "worker")
            parts = [f"device: cpu, {trainer.compute_dtype}", f"trainer with {threads}", workers]
            if "trainer.max_tokens_per_microbatch" in self.chosen:
                parts.append(f"passes of {trainer.max_tokens_per_microbatch:,} tokens")
            if "trainer.gradient_checkpointing" in self.chosen:
                parts.append(f"gradient checkpointing {_checkpointing(trainer)}")
            return [", ".join(parts), *self.notes]
        cache = inference.kv_memory_mb
        stored = "" if inference.kv_dtype == "auto" else f" in {inference.kv_dtype}"
        rounded = "" if inference.weights_dtype == "auto" else f" with {inference.weights_dtype} weights"
        lines = [
            trainer_line(trainer),
            f"policy: {inference.device}, {inference.dtype}{rounded}, {inference.max_running} requests, keys and values "
            f"{cache if isinstance(cache, str) else f'{cache / 1000:.1f} GB'}{stored}, weights by {inference.transfer}"
            + (f", {inference.replicas} replicas" if inference.replicas > 1 else ""),
            f"rollout: {_count(rollout.workers, 'worker')}",
            *mps_lines(bool(config.resources.mps)),
        ]
        if self.plan is not None:
            lines += gpu_lines(self.plan, self.machine, self.capacity)
        return [*lines, *self.notes]


def trainer_line(trainer: TrainerConfig) -> str:
    tokens = trainer.max_tokens_per_microbatch
    passes = "passes measured at the start" if tokens is None else f"passes of {tokens:,} tokens"
    return (
        f"trainer: {trainer.device}, {trainer.compute_dtype}, {passes}, gradient checkpointing "
        f"{_checkpointing(trainer)}, {_count(trainer.threads, 'thread')}"
        + (f", {trainer.ranks} ranks" if trainer.ranks > 1 else "")
    )


def gpu_lines(plan: MemoryPlan, machine: Machine, capacity: Mapping[str, int]) -> list[str]:
    """One line for GPUs with equal parts."""
    alike: dict[tuple[Any, ...], list[Gpu]] = defaultdict(list)
    for device in machine.gpus:
        place = gpu(device.number)
        if plan.total(place):
            parts = tuple((part.what, part.num_bytes) for part in plan.parts if part.place == place)
            alike[device.name, capacity[place], parts].append(device)
    return [
        f"{numbers([device.number for device in devices])}: {name}, {devices[0].memory_bytes / GB:.0f} GB"
        f"{' each' if len(devices) > 1 else ''}; planned {plan.total(gpu(devices[0].number)) / GB:.1f} of "
        f"{room / GB:.1f}: " + ", ".join(plan.lines(gpu(devices[0].number)))
        for (name, room, _), devices in alike.items()
    ]


def does_not_fit(plan: MemoryPlan, place: str, missing: int, room: int, advice: Sequence[Saving]) -> str:
    """What is said of a place that is too small."""
    lines = [*plan.lines(place), *map(str, advice)]
    text = (
        f"the run needs {sized(plan.total(place))} of {place}, which has {sized(room)}; {sized(missing)} are missing:"
    )
    return "\n".join([text, *(f"  {line}" for line in lines)])


def resolve(
    loaded: LoadedConfig,
    machine: Machine,
    *,
    recorded: RunConfig | None = None,
    disk_bytes: int | None = None,
    has_trainer: bool = True,
) -> Resolution:
    """`recorded`: the configuration of the run that is resumed; what it chose is not chosen again. `has_trainer`: False if the
    trainer is an external program; then its memory is unknown, and there is no plan."""
    draft = _Draft(loaded.config, has_trainer=has_trainer)
    facts, capacity = _facts(loaded, machine), gpu_capacity(machine, loaded.config.run.gpu_memory_gb)
    if recorded is not None:
        draft.take(recorded)
    else:
        draft.choose_agents(machine)
        draft.choose_devices(machine, facts)
        draft.divide(machine, facts, capacity)
        draft.choose_transfer()
        if has_trainer:
            draft.choose_base(machine, facts, model_directory(loaded.config.model, loaded.source_dir))
    draft.choose_mps(machine)
    sizes = sizes_of(draft.config, machine)
    has_all = set(range(len(machine.gpus))) >= gpus_of(draft.config)
    facts = facts if has_trainer else None
    if recorded is None and facts is not None and draft.uses_gpu and has_all:
        sizes = draft.choose_memory(facts, sizes, capacity, machine)
    elif recorded is None and facts is not None and not draft.uses_gpu:
        sizes = draft.choose_passes(facts, sizes, machine)
    elif facts is not None and has_all:
        sizes = choose_sizes(facts, sizes, frozenset(), capacity, demand_of(draft.config, facts, sizes))
    plan = None if facts is None else memory_plan(facts, sizes)
    if draft.config.resources.mps == OPTIONAL_MPS and plan is not None and plan.overfull(capacity):
        plain = replace(loaded, config=without_mps(loaded.config))
        found = resolve(plain, machine, recorded=recorded, disk_bytes=disk_bytes, has_trainer=has_trainer)
        return replace(found, notes=(*found.notes, f"mps: off ({TURNS}), because the GPU has no memory for its server"))
    capacity = {**capacity, MAIN_MEMORY: machine.memory_bytes}
    if disk_bytes is not None:
        capacity[DISK] = disk_bytes
    config = draft.config
    return Resolution(
        loaded=replace(loaded, config=config),
        chosen=draft.chosen,
        machine=machine,
        model=facts,
        sizes=sizes,
        plan=plan,
        capacity=capacity,
        notes=(*draft.notes, *_notes(config, machine, facts)),
        missing=tuple(machine_faults(config, machine, is_resumed=recorded is not None)),
    )


class _Draft:
    """A configuration whose open settings are chosen one after the other."""

    def __init__(self, config: RunConfig, *, has_trainer: bool) -> None:
        self.config = config
        self.chosen: dict[str, Any] = {}
        self.notes: list[str] = []
        self._open = {
            path
            for path in AUTO_SETTINGS
            if not is_set(config, path) and (has_trainer or not path.startswith("trainer."))
        }

    @property
    def uses_gpu(self) -> bool:
        return self.config.trainer.device == "cuda" or self.config.inference.device != "cpu"

    def choose(self, path: str, value: Any) -> None:
        """Unless the user has set it, or it has this value already."""
        if path not in self._open or value_at(self.config, path) == value:
            return
        section, _, name = path.partition(".")
        changed = getattr(self.config, section).model_copy(update={name: value})
        self.config = self.config.model_copy(update={section: changed})
        self.chosen[path] = value

    def take(self, recorded: RunConfig) -> None:
        for path in sorted(self._open):
            self.choose(path, value_at(recorded, path))
        self._open.clear()

    def choose_agents(self, machine: Machine) -> None:
        """How many coding agents run at once. Started all together on few cores, none gets to its first request in time."""
        config = self.config
        at_once = AGENTS_PER_CORE * machine.cores
        is_open = {"sandbox.at_once", "gate.max_groups_in_flight"} <= self._open
        if (
            config.coding_agent is None
            or not is_open
            or config.cluster.has_members
            or episodes_in_flight(config) <= at_once
        ):
            return
        # As many again wait for a place, so that none is empty.
        groups = max(2, 2 * at_once // config.rollout.episodes_per_group)
        self.choose("sandbox.at_once", at_once)
        self.choose("gate.max_groups_in_flight", min(groups, config.gate.max_groups_in_flight))
        self.notes.append(
            f"agents: at most {at_once} at once on {_count(machine.cores, 'core')} (sandbox.at_once), "
            f"{self.config.gate.max_groups_in_flight} groups in flight (gate.max_groups_in_flight)"
        )

    def choose_devices(self, machine: Machine, model: ModelFacts | None) -> None:
        """Everything that does not depend on memory."""
        usable = machine.gpus
        is_small = model is not None and model.parameters < MIN_GPU_PARAMETERS
        config = self.config
        names_gpus = bool(config.resources.policy_gpus or config.resources.trainer_gpus)
        if not usable or (is_small and not names_gpus):
            # A device that is set may still be a GPU.
            usable = () if config.trainer.device == "cpu" and config.inference.device == "cpu" else machine.gpus
        if not usable:
            return
        if not is_small or names_gpus:
            self.choose("trainer.device", "cuda")
            if self.config.inference.engine != "scripted" and not self.config.inference.urls:
                self.choose("inference.device", "cuda")
        precise = precision_of(self._precise_gpus(usable, model))
        if self.config.trainer.device == "cuda":
            self.choose("trainer.compute_dtype", precise)
            self.choose("trainer.threads", max(1, min(TRAINER_THREADS, machine.cores // 2)))
            self.choose("trainer.pass_cost_tokens", GPU_PASS_COST)
        if self.config.inference.device != "cpu":
            self.choose("inference.dtype", precise)
            self._choose_running(1)
        groups = min(self.config.gate.max_groups_in_flight, MAX_WORKERS)
        self.choose("rollout.workers", max(1, min(groups, machine.cores // 2)))

    def _precise_gpus(self, usable: Sequence[Gpu], model: ModelFacts | None) -> Sequence[Gpu]:
        """Those that the run will use."""
        counts = self.config.resources.gpus
        if counts is not None:
            return usable[: counts.trainer + counts.policy]
        if self._is_divisible(model):
            return usable
        used = gpus_of(self.config)
        return [device for device in usable if device.number in used] or usable

    def _choose_running(self, replicas: int) -> None:
        each = -(-episodes_in_flight(self.config) // max(replicas, self.config.inference.replicas))
        self.choose("inference.max_running", next((b for b in RUNNING_BUCKETS if b >= each), RUNNING_BUCKETS[-1]))

    def divide(self, machine: Machine, model: ModelFacts | None, capacity: Mapping[str, int]) -> None:
        """GPUs of the trainer and of the policy servers, if there are several and the user has not named them."""
        config, counts = self.config, self.config.resources.gpus
        if model is None or not self._is_divisible(model):
            return
        sizes = replace(sizes_of(config, machine), longest=longest_sequence(config, model))
        if counts is not None:
            memory = min(capacity.values(), default=0)
            found = division_of(model, sizes, trainer=counts.trainer, policy=counts.policy, memory=memory)
        elif len(machine.gpus) > 1:
            demand, free = demand_of(config, model, sizes), self._free_sizes() - {"has_gpu_checkpoint"}
            found = best_division(model, config, sizes, free=free, capacity=capacity, demand=demand)
        else:
            return
        self.choose("trainer.ranks", len(found.trainer_gpus))
        self.choose("inference.replicas", found.replicas)
        self.choose("resources.trainer_gpus", found.trainer_gpus)
        self.choose("resources.policy_gpus", found.policy_gpus)
        self.notes.append(str(found))
        if "inference.max_running" in self.chosen:
            self._choose_running(found.replicas)

    def _is_divisible(self, model: ModelFacts | None) -> bool:
        """Whether the plan decides which GPUs trainer and policy get."""
        config = self.config
        is_open = {
            "trainer.ranks",
            "inference.replicas",
            "resources.trainer_gpus",
            "resources.policy_gpus",
        } <= self._open
        is_local = not (config.inference.urls or config.cluster.has_members or engine_of(config.inference) == "none")
        is_on_gpu = config.trainer.device == "cuda" and config.inference.device == "cuda"
        return model is not None and is_local and is_on_gpu and (is_open or config.resources.gpus is not None)

    def _free_sizes(self) -> frozenset[str]:
        """Sizes that the memory plan chooses; see `choose_sizes`."""
        config = self.config
        names = {
            "trainer.max_tokens_per_microbatch": "tokens_per_pass",
            "trainer.gradient_checkpointing": "checkpointed_layers",
            "trainer.max_logits_mb": "logits_bytes",
            "trainer.checkpoint_copy": "has_gpu_checkpoint",
            "inference.transfer": "gpu_copies",
        }
        free = {name for path, name in names.items() if path in self._open and config.trainer.device == "cuda"}
        if config.trainer.is_sharded:  # each rank copies its shards to main memory
            free.discard("has_gpu_checkpoint")
        is_embedded = config.inference.engine == "transformers" and config.inference.device != "cpu"
        if is_embedded and "inference.kv_memory_mb" in self._open:
            free.add("kv_bytes")
        return frozenset(free)

    def choose_transfer(self) -> None:
        if self.config.trainer.device != "cuda":
            return
        config = self.config
        shares_gpu = not (config.resources.are_separate or config.cluster.has_members)
        self.choose(
            "inference.transfer", chosen_transfer(reachable(config), config.trainer.device, shares_gpu=shares_gpu)
        )

    def choose_base(self, machine: Machine, model: ModelFacts | None, model_dir: Path | None) -> None:
        """Whether the frozen base of adapters is shared. Where it could be on a GPU and is not, a note says why."""
        config, sizes = self.config, sizes_of(self.config, machine)
        if config.trainer.lora is None or config.trainer.device != "cuda" or "resources.shared_base" not in self._open:
            return
        reason = why_not_shared(config, sizes, model_dir)
        if reason is None and model is not None:
            reason = why_not_worth_it(model, sizes)
        if reason is None:
            self.choose("resources.shared_base", True)
        elif set(sizes.trainer_gpus) & {number for group in sizes.policy_gpus for number in group}:
            self.notes.append(f"base: each process loads its own, because {reason}")

    def choose_mps(self, machine: Machine) -> None:
        """A server of the run, where trainer and embedded policy servers share a GPU (decision 0061: kills of other engines under
        it were not tried). An optional one is left out where it cannot be used; a note says why if this machine is the reason."""
        config, sizes = self.config, sizes_of(self.config, machine)
        policies = {number for group in sizes.policy_gpus for number in group}
        is_shared = config.trainer.device == "cuda" and bool(policies & set(sizes.trainer_gpus))
        if is_shared and sizes.engine == "embedded":
            self.choose("resources.mps", OPTIONAL_MPS)
        if self.config.resources.mps != OPTIONAL_MPS:
            return
        # The table names another server.
        is_pointless = why_no_mps(config, sizes) is not None or other_server(os.environ) is not None
        reason = why_no_mps_here(machine)
        if is_pointless or reason is not None:
            self.config = without_mps(self.config)
            self.chosen.pop("resources.mps", None)
        if not is_pointless and machine.gpus and reason is not None:
            self.notes.append(f"mps: off ({TURNS}), because {reason}")

    def choose_memory(self, model: ModelFacts, sizes: Sizes, capacity: Mapping[str, int], machine: Machine) -> Sizes:
        config = self.config
        is_embedded = config.inference.engine == "transformers" and config.inference.device != "cpu"
        if is_embedded and model.context is not None:
            rounded = -(-config.rollout.max_total_tokens // BLOCK) * BLOCK + BLOCK
            self.choose("inference.max_model_len", min(model.context, rounded))
            config = self.config
            sizes = replace(sizes, longest=longest_sequence(config, model))
        free = set(self._free_sizes())
        shares_with_trainer = {n for g in sizes.policy_gpus for n in g} & set(sizes.trainer_gpus)
        is_vllm_open = (
            config.inference.engine == "vllm" and config.inference.vllm.gpu_memory_share is None and shares_with_trainer
        )
        if is_vllm_open:
            free.add("kv_bytes")
        sizes = choose_sizes(model, sizes, frozenset(free), capacity, demand_of(config, model, sizes))
        sizes = replace(sizes, kv_bytes=sizes.kv_bytes // MB * MB)
        if config.trainer.device == "cuda":
            self.choose("trainer.max_tokens_per_microbatch", sizes.tokens_per_pass)
            self.choose("trainer.gradient_checkpointing", checkpointing_of(model, sizes))
            self.choose("trainer.max_logits_mb", sizes.logits_bytes >> 20)
            self.choose("trainer.checkpoint_copy", "gpu" if sizes.has_gpu_checkpoint else "main_memory")
            if not sizes.gpu_copies and config.inference.transfer in GPU_TRANSFERS:
                without = config.inference.model_copy(update={"transfer": "auto"})
                self.choose("inference.transfer", chosen_transfer(without, "cpu"))
            longest = longest_trainable(model, sizes, capacity)
            if longest is not None and model.context is not None and longest < model.context:
                self.choose("trainer.max_sequence_tokens", longest)
        if is_embedded:
            self.choose("inference.kv_memory_mb", float(sizes.kv_bytes // 10**6))
        self._choose_limits(memory_plan(model, sizes), sizes, capacity, machine)
        return sizes

    def choose_passes(self, model: ModelFacts, sizes: Sizes, machine: Machine) -> Sizes:
        """Without a GPU: smaller passes, then gradient checkpointing, where the run does not fit into main memory otherwise."""
        capacity = {MAIN_MEMORY: round((1 - HEADROOM_SHARE) * machine.memory_bytes)}
        tokens, layers = [sizes.tokens_per_pass], [sizes.checkpointed_layers]
        if "trainer.max_tokens_per_microbatch" in self._open:
            tokens += [size for size in CPU_PASSES if sizes.longest <= size < sizes.tokens_per_pass]
        if "trainer.gradient_checkpointing" in self._open:
            layers.append(model.layers)
        found = [replace(sizes, checkpointed_layers=some, tokens_per_pass=most) for some in layers for most in tokens]
        best = next((one for one in found if not memory_plan(model, one).overfull(capacity)), found[-1])
        if best.tokens_per_pass < sizes.tokens_per_pass:
            self.choose("trainer.max_tokens_per_microbatch", best.tokens_per_pass)
        self.choose("trainer.gradient_checkpointing", bool(best.checkpointed_layers))
        return best

    def _choose_limits(self, plan: MemoryPlan, sizes: Sizes, capacity: Mapping[str, int], machine: Machine) -> None:
        """With `run.gpu_memory_gb`, no process may take more than its part. The trainer gets what the others leave."""
        config = self.config
        if config.inference.engine == "vllm" and config.inference.device != "cpu" and sizes.engine == "vllm":
            place = gpu(sizes.policy_gpus[0][0])
            total = next(device.memory_bytes for device in machine.gpus if gpu(device.number) == place)
            if config.inference.vllm.gpu_memory_share is None and (
                config.run.gpu_memory_gb is not None or gpu(sizes.trainer_gpus[0]) == place
            ):
                share = round(plan.total(place, "policy") / total, 3)
                vllm = config.inference.vllm.model_copy(update={"gpu_memory_share": share})
                inference = config.inference.model_copy(update={"vllm": vllm})
                self.config = config.model_copy(update={"inference": inference})
                self.chosen["inference.vllm.gpu_memory_share"] = share
        if config.run.gpu_memory_gb is None:
            return
        if config.inference.engine == "transformers" and config.inference.device != "cpu":
            place = gpu(sizes.policy_gpus[0][0])
            own = plan.total(place, "policy") - CONTEXT_BYTES
            self.choose("inference.gpu_memory_gb", round(own / GB, 2))
        if config.trainer.device == "cuda":
            place = gpu(sizes.trainer_gpus[0])
            others = plan.total(place) - plan.total(place, "trainer")
            self.choose("trainer.gpu_memory_gb", round((capacity[place] - others - CONTEXT_BYTES) / GB, 2))


def is_set(config: RunConfig, path: str) -> bool:
    section, _, name = path.partition(".")
    return name in getattr(config, section).model_fields_set


def value_at(config: RunConfig, path: str) -> Any:
    section, _, name = path.partition(".")
    return getattr(getattr(config, section), name)


def _facts(loaded: LoadedConfig, machine: Machine) -> ModelFacts | None:
    return model_facts(loaded.config.model, loaded.source_dir, may_download=bool(machine.gpus))


def gpu_capacity(machine: Machine, limit_gb: float | None) -> dict[str, int]:
    """What may be planned on each GPU."""
    return {
        gpu(device.number): round(
            (1 - HEADROOM_SHARE) * min(_free(device), limit_gb * GB if limit_gb else _free(device))
        )
        for device in machine.gpus
    }


def _free(device: Gpu) -> int:
    return device.memory_bytes - device.used_bytes


def _notes(config: RunConfig, machine: Machine, model: ModelFacts | None) -> Sequence[str]:
    """GPUs that the run does not use, and why."""
    if machine.unusable_gpus:
        names = "; ".join(map(str, machine.unusable_gpus))
        return [f"{names}: not used, because {machine.unusable_because}"]
    used = gpus_of(config)
    unused = [device for device in machine.gpus if device.number not in used]
    if not unused:
        return []
    if model is not None and model.parameters < MIN_GPU_PARAMETERS and not used:
        reason = f"{model.parameters / 1e6:.1f} million parameters are not faster on it; trainer.device and inference.device set it"
    elif not used:
        reason = "trainer.device and inference.device are 'cpu'"
    else:
        reason = "the run has no process for it (resources.gpus divides them)"
    return [f"{'; '.join(map(str, unused))}: not used: {reason}"]


def precision_of(gpus: Sequence[Gpu]) -> str:
    return "bfloat16" if all(device.has_bfloat16 for device in gpus) else "float32"


def checkpointing_of(model: ModelFacts, sizes: Sizes) -> bool | int:
    """The value of `trainer.gradient_checkpointing`: a number of layers, or whether all are recomputed."""
    is_whole = sizes.checkpointed_layers in (0, model.layers)
    return bool(sizes.checkpointed_layers) if is_whole else sizes.checkpointed_layers


def _checkpointing(trainer: TrainerConfig) -> str:
    layers = trainer.gradient_checkpointing
    return "off" if not layers else "on" if layers is True else f"of {_count(layers, 'layer')}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' if number != 1 else ''}"


def free_disk_bytes(path: Path) -> int | None:
    """On the disk of a run directory, which need not exist yet. None if no files can be stored there, as in /proc."""
    usage = shutil.disk_usage(next(folder for folder in (path, *path.parents) if folder.exists()))
    return usage.free if usage.total else None
