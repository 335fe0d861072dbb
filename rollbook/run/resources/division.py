"""Divides the GPUs of a machine between trainer ranks and policy servers.

Every division that fits in memory is simulated with durations that are estimated from the sizes of model and answers; the one that
trains most tokens a second is taken. Only the relation of training to generation matters, so the estimate needs no measurement.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from rollbook.run.config.run import RunConfig
from rollbook.run.resources.memory_plan import (
    DTYPE_BYTES,
    EIGHT_BITS,
    VLLM_BYTES,
    Sizes,
    least_kv_bytes,
    memory_plan,
    row_bytes,
)
from rollbook.run.resources.model_facts import ModelFacts
from rollbook.run.resources.size_choice import Demand, choose_sizes
from rollbook.simulation.durations import Durations, Episode, RequestTime, TaskDurations, TrainingTime, Turn
from rollbook.simulation.prediction import predict_part
from rollbook.simulation.setting import Setting

FLOPS = 350e12
"""Operations a second that a trainer achieves on one GPU (an H100; the relation to the bandwidth is similar on others)."""
BANDWIDTH = 1.2e12
"""Bytes a second that an engine achieves."""
RANKS_SHARE = 0.85
"""Speed of each of several ranks, relative to one alone: they exchange weights and gradients."""
MEAN_SHARE = 0.5
"""Length of a usual answer, relative to the longest."""
WORKS = (0.4, 0.7, 1.0, 1.3, 1.6)
"""Lengths of answers, relative to the usual one."""
STEPS = 12
SAME = 0.02
"""Divisions whose estimates differ by less are equal; then the one with fewer ranks is taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    trainer_gpus: tuple[int, ...]
    policy_gpus: tuple[int, ...]
    replicas: int
    step_s: float | None = None
    """Estimated; None if the numbers are those of the user."""

    def __str__(self) -> str:
        ranks, servers = numbers(self.trainer_gpus), numbers(self.policy_gpus)
        estimate = "" if self.step_s is None else f"; by estimate the fastest division, {self.step_s:.2g} s a step"
        return f"division: trainer on {ranks}, {self.replicas} policy server{'s' * (self.replicas > 1)} on {servers}{estimate}"


def numbers(gpus: Sequence[int]) -> str:
    """`GPU 0`, `GPUs 0-3`, `GPUs 0, 2`."""
    if len(gpus) == 1:
        return f"GPU {gpus[0]}"
    is_range = list(gpus) == list(range(gpus[0], gpus[-1] + 1))
    return f"GPUs {gpus[0]}-{gpus[-1]}" if is_range else f"GPUs {', '.join(map(str, gpus))}"


def division_of(model: ModelFacts, sizes: Sizes, *, trainer: int, policy: int, memory: int) -> Division:
    """The first GPUs are the trainer's. An embedded engine uses one GPU; vLLM uses as many as its weights need."""
    each = 1 if sizes.engine == "embedded" else _tensor_parallel(model, sizes, policy, memory)
    return Division(
        trainer_gpus=tuple(range(trainer)),
        policy_gpus=tuple(range(trainer, trainer + policy)),
        replicas=policy // each,
    )


def best_division(
    model: ModelFacts,
    config: RunConfig,
    sizes: Sizes,
    *,
    free: frozenset[str],
    capacity: Mapping[str, int],
    demand: Demand,
) -> Division:
    """The fastest division of all GPUs that fits. If none fits, the one with most GPUs for the trainer.

    `sizes`: those of one GPU. `free`: see `choose_sizes`.
    """
    count, memory = len(capacity), min(capacity.values())
    found: list[Division] = []
    for trainer in range(1, count):
        division = division_of(model, sizes, trainer=trainer, policy=count - trainer, memory=memory)
        chosen = choose_sizes(model, with_division(sizes, division), free, capacity, demand)
        if not memory_plan(model, chosen).overfull(capacity):
            found.append(replace(division, step_s=estimated_step_s(model, config, division)))
    if not found:
        return division_of(model, sizes, trainer=count - 1, policy=1, memory=memory)
    fastest = min(division.step_s or 0.0 for division in found)
    return next(division for division in found if (division.step_s or 0.0) <= fastest * (1 + SAME))


def with_division(sizes: Sizes, division: Division) -> Sizes:
    each = len(division.policy_gpus) // division.replicas
    policy = tuple(division.policy_gpus[n * each : (n + 1) * each] for n in range(division.replicas))
    if sizes.has_mapped_weights:  # of another GPU, they cannot be mapped
        sizes = replace(sizes, gpu_copies=0, has_mapped_weights=False, is_shared_memory=True)
    return replace(sizes, trainer_gpus=division.trainer_gpus, policy_gpus=policy)


def estimated_step_s(model: ModelFacts, config: RunConfig, division: Division) -> float:
    """Seconds a step of a simulated run."""
    tokens = max(1, round(MEAN_SHARE * config.rollout.max_total_tokens))
    ranks, each = len(division.trainer_gpus), len(division.policy_gpus) // division.replicas
    operations = (6 if config.trainer.lora is None else 4) * model.active_parameters
    speed = FLOPS * ranks * (RANKS_SHARE if ranks > 1 else 1.0)
    # The tokens of a step use all experts together.
    bytes_each = 2 if config.inference.weights_dtype == "auto" else 1
    read, compute = bytes_each * model.parameters / BANDWIDTH, 2 * model.active_parameters / FLOPS
    cached = row_bytes(model, "bfloat16" if config.inference.kv_dtype == "auto" else EIGHT_BITS, tokens) / BANDWIDTH
    durations = Durations(
        tasks=(TaskDurations(groups=tuple(_group(tokens, work) for work in WORKS)),),
        request=RequestTime(base_s=tokens * read / each, per_request_s=tokens * (cached + compute) / each),
        training=TrainingTime(per_token_s=operations / speed),
    )
    setting = Setting(
        rule=replace(config.ledger_settings().rule, max_steps=None),
        samples_per_group=config.rollout.completions_per_prompt,
        slots=max(config.rollout.slots, config.gate.max_groups_in_flight),
        workers=config.rollout.workers,
        replicas=division.replicas,
    )
    return 1.0 / predict_part(setting, durations, steps=STEPS).steps_per_s


def _group(tokens: int, work: float) -> tuple[Episode, ...]:
    return tuple(
        Episode(turns=(Turn(work=work * factor, act_s=0.0),), tokens=max(1, round(tokens * work * factor)))
        for factor in (0.8, 0.9, 1.0, 1.1, 1.2)
    )


def _tensor_parallel(model: ModelFacts, sizes: Sizes, policy: int, memory: int) -> int:
    """GPUs of one vLLM server: the smallest number that divides `policy` and holds the weights."""
    weights, cache = DTYPE_BYTES[sizes.policy_dtype] * model.parameters, least_kv_bytes(model, sizes)
    fitting = (n for n in range(1, policy + 1) if policy % n == 0 and (weights + cache) / n + VLLM_BYTES <= memory)
    return next(fitting, policy)
