"""Chooses pass size, cache, chunks of logits and gradient checkpointing, so that a run fits in the memory of its GPUs."""

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
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
    """Chooses the sizes named in `free`: `tokens_per_pass`, `checkpointed_layers`, `logits_bytes`, `kv_bytes`, `gpu_copies`,
    `has_gpu_checkpoint`.

    What costs least speed is reduced first: cache and passes, then the copy for checkpoints is made in main memory, then chunks of
    logits are smaller; then published copies are made in main memory, and the activations of as few layers as possible are
    recomputed. If nothing fits, the smallest sizes are returned.
    """
    enough = min(filling_tokens(model), demand.step_tokens) if "tokens_per_pass" in free else sizes.tokens_per_pass
    logits_choices = [mb << 20 for mb in LOGITS_MB] if "logits_bytes" in free else [sizes.logits_bytes]

    copies = [sizes]
    if "gpu_copies" in free and sizes.gpu_copies:
        copies.append(replace(sizes, gpu_copies=0, has_mapped_weights=False, is_shared_memory=True))
    forms: list[Sizes] = []
    for one in copies:
        small = replace(one, has_gpu_checkpoint=False) if "has_gpu_checkpoint" in free else one
        if "has_gpu_checkpoint" in free:
            forms.append(replace(one, has_gpu_checkpoint=True, logits_bytes=logits_choices[0]))
        forms += [replace(small, logits_bytes=logits) for logits in logits_choices]

    def candidates(checkpointed_layers: int) -> Iterator[Sizes]:
        for one in forms:
            yield _filled(model, replace(one, checkpointed_layers=checkpointed_layers), free, capacity, demand)

    def fits(found: Sizes) -> bool:
        return not memory_plan(model, found).overfull(capacity)

    def is_enough(checkpointed_layers: int) -> bool:
        return any(found.tokens_per_pass >= enough and fits(found) for found in candidates(checkpointed_layers))

    layers = range(model.layers + 1) if "checkpointed_layers" in free else [sizes.checkpointed_layers]
    fewest = layers[bisect_left(layers[:-1], True, key=is_enough)]
    found = [*candidates(fewest)]
    fitting = [one for one in found if fits(one)]
    return next(
        (one for one in fitting if one.tokens_per_pass >= enough),
        max(fitting, key=lambda one: one.tokens_per_pass, default=found[-1]),
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
    per_token = ALLOCATOR_SHARE * activation_bytes_per_token(model, sizes)
    least, useful = sizes.tokens_per_pass, int(PASS_SHARE * min(capacity[place] for place in places) / per_token)
    low, high = 0, max(0, min(MAX_PASS_TOKENS, demand.step_tokens, useful) - least) // PASS_STEP
    while low < high:
        middle = (low + high + 1) // 2
        plan = memory_plan(model, replace(sizes, tokens_per_pass=least + middle * PASS_STEP))
        fits = all(plan.total(place) <= capacity[place] for place in places)
        low, high = (middle, high) if fits else (low, middle - 1)
    return replace(sizes, tokens_per_pass=least + low * PASS_STEP)
