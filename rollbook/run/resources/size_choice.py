"""Chooses pass size, cache, chunks of logits and gradient checkpointing, so that a run fits in the memory of its GPUs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from rollbook.run.resources.memory_plan import (
    ALLOCATOR_SHARE,
    MIN_LOGITS_MB,
    Sizes,
    activation_bytes_per_token,
    gpu,
    least_kv_bytes,
    memory_plan,
)
from rollbook.run.resources.model_facts import ModelFacts

PASS_SHARE = 0.25
"""Of a GPU, for a pass: larger passes are not faster."""
MIN_PASS_TOKENS, MAX_PASS_TOKENS = 1024, 131_072
FILLING_PRODUCTS = 90_000_000_000
"""Parameters of a layer times tokens of a pass with which computing a layer takes longer than starting its kernels. Below it,
recomputing activations in larger passes is faster."""
MIN_FILLING_TOKENS, MAX_FILLING_TOKENS = 2048, 16_384
PASS_STEP = 256
LOGITS_MB = (2048, 512, 128, MIN_LOGITS_MB)
"""Megabytes of logits at a time, from the fastest to the smallest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """How much of the chosen sizes a run can use."""

    kv_bytes: int
    """Keys and values of all requests that are decoded together, and of cached prefixes."""
    step_tokens: int
    """Tokens of a step."""


def choose_sizes(
    model: ModelFacts, sizes: Sizes, free: frozenset[str], capacity: Mapping[str, int], demand: Demand
) -> Sizes:
    """Chooses the sizes named in `free`: `tokens_per_pass`, `is_checkpointing`, `logits_bytes`, `kv_bytes`.

    What costs least speed is reduced first: cache and passes, then chunks of logits; then published copies are made in main memory,
    and activations are recomputed. If nothing fits, the smallest sizes are returned.
    """
    candidates = [
        _filled(
            model,
            replace(sizes, is_checkpointing=is_checkpointing, logits_bytes=logits_bytes, gpu_copies=gpu_copies),
            free,
            capacity,
            demand,
        )
        for gpu_copies in dict.fromkeys((sizes.gpu_copies, 0))
        for is_checkpointing in ((False, True) if "is_checkpointing" in free else (sizes.is_checkpointing,))
        for logits_bytes in (
            [megabytes << 20 for megabytes in LOGITS_MB] if "logits_bytes" in free else [sizes.logits_bytes]
        )
    ]
    fitting = [found for found in candidates if not memory_plan(model, found).overfull(capacity)]
    if not fitting:
        return candidates[-1]
    enough = min(filling_tokens(model), demand.step_tokens)
    return next(
        (found for found in fitting if found.tokens_per_pass >= enough and not found.is_checkpointing),
        max(fitting, key=lambda found: found.tokens_per_pass),
    )


def filling_tokens(model: ModelFacts) -> int:
    """Tokens of a pass that keep a GPU busy."""
    return max(MIN_FILLING_TOKENS, min(MAX_FILLING_TOKENS, FILLING_PRODUCTS // model.layer_parameters))


def _filled(
    model: ModelFacts, sizes: Sizes, free: frozenset[str], capacity: Mapping[str, int], demand: Demand
) -> Sizes:
    """With the cache and the pass as large as they are useful and fit."""
    least_pass = max(1, min(MIN_PASS_TOKENS, demand.step_tokens))
    filled = sizes
    if "kv_bytes" in free:
        filled = replace(filled, kv_bytes=min(demand.kv_bytes, least_kv_bytes(model, sizes)))
    if "tokens_per_pass" in free:
        filled = replace(filled, tokens_per_pass=least_pass)
    trainer = [gpu(number) for number in sizes.trainer_gpus] if sizes.trainer_device == "cuda" else []
    policy = [gpu(gpus[0]) for gpus in sizes.policy_gpus] if sizes.policy_device != "cpu" else []
    if "kv_bytes" in free and policy:
        # The trainer gets half of a shared GPU first; what it does not use is given to the cache below.
        filled = _with_larger_cache(model, filled, policy, capacity, demand, parts=2 if {*trainer} & {*policy} else 1)
    if "tokens_per_pass" in free and trainer:
        filled = _with_larger_pass(model, filled, trainer, capacity, demand)
    if "kv_bytes" in free and policy:
        filled = _with_larger_cache(model, filled, policy, capacity, demand, parts=1)
    return filled


def _with_larger_cache(
    model: ModelFacts, sizes: Sizes, places: Sequence[str], capacity: Mapping[str, int], demand: Demand, *, parts: int
) -> Sizes:
    plan, servers = memory_plan(model, sizes), 2 if sizes.has_own_evaluation else 1
    room = min(capacity[place] - plan.total(place) for place in places) // (servers * parts)
    return replace(sizes, kv_bytes=min(demand.kv_bytes, sizes.kv_bytes + max(0, room)))


def _with_larger_pass(
    model: ModelFacts, sizes: Sizes, places: Sequence[str], capacity: Mapping[str, int], demand: Demand
) -> Sizes:
    per_token = ALLOCATOR_SHARE * activation_bytes_per_token(
        model, dtype=sizes.compute_dtype, is_checkpointing=sizes.is_checkpointing
    )
    least, useful = sizes.tokens_per_pass, int(PASS_SHARE * min(capacity[place] for place in places) / per_token)
    low, high = 0, max(0, min(MAX_PASS_TOKENS, demand.step_tokens, useful) - least) // PASS_STEP
    while low < high:
        middle = (low + high + 1) // 2
        plan = memory_plan(model, replace(sizes, tokens_per_pass=least + middle * PASS_STEP))
        fits = all(plan.total(place) <= capacity[place] for place in places)
        low, high = (middle, high) if fits else (low, middle - 1)
    return replace(sizes, tokens_per_pass=least + low * PASS_STEP)
