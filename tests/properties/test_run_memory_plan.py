"""The memory plan: its parts add up, more memory never refuses a run, and suggested settings save what they say."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import cast

from hypothesis import given, settings
from hypothesis import strategies as st

from rollbook.run.config.run import load_config
from rollbook.run.resources.division import best_division, with_division
from rollbook.run.resources.memory_plan import (
    ALL_LAYERS,
    CONTEXT_BYTES,
    DISK,
    DTYPE_BYTES,
    GB,
    MAIN_MEMORY,
    MB,
    TORCH_PROCESS_BYTES,
    Engine,
    OptimizerState,
    Sizes,
    gpu,
    memory_plan,
    savings,
)
from rollbook.run.resources.model_facts import ModelFacts, facts_of
from rollbook.run.resources.size_choice import Demand, choose_sizes, filling_tokens
from rollbook.trainer.config import LoraSettings

DEMO = Path(__file__).parents[2] / "rollbook" / "demo" / "run.toml"
FREE = ("tokens_per_pass", "checkpointed_layers", "logits_bytes", "kv_bytes", "gpu_copies", "has_gpu_checkpoint")


@st.composite
def models(draw: st.DrawFn) -> ModelFacts:
    heads = draw(st.integers(1, 64))
    found = facts_of(
        {
            "hidden_size": 64 * heads,
            "num_hidden_layers": draw(st.integers(1, 96)),
            "num_attention_heads": heads,
            "num_key_value_heads": draw(st.integers(1, heads)),
            "intermediate_size": 64 * draw(st.integers(1, 512)),
            "vocab_size": draw(st.integers(64, 256_000)),
            "max_position_embeddings": 32_768,
            "tie_word_embeddings": draw(st.booleans()),
        },
        None,
    )
    assert found is not None
    return found


@st.composite
def sizes(draw: st.DrawFn) -> Sizes:
    trainer, policy = (draw(st.sampled_from(["cpu", "cuda"])) for _ in range(2))
    ranks, replicas = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    is_separate = draw(st.booleans())
    lora = draw(st.sampled_from([None, LoraSettings(), LoraSettings(rank=64, targets=("q_proj", "v_proj"))]))
    first = ranks if is_separate else 0
    return Sizes(
        trainer_device=trainer,
        compute_dtype=draw(st.sampled_from(["float32", "bfloat16"])),
        optimizer_state=draw(st.sampled_from(["device", "host", "8bit"])),
        lora=lora,
        is_base_shared=lora is not None and draw(st.booleans()),
        has_reference=draw(st.booleans()),
        tokens_per_pass=draw(st.integers(1, 131_072)),
        longest=draw(st.integers(2, 32_768)),
        checkpointed_layers=draw(st.integers(0, 100)),
        logits_bytes=draw(st.integers(1, 4096)) << 20,
        keep_checkpoints=draw(st.integers(1, 5)),
        gpu_copies=draw(st.sampled_from([0, 3])),
        has_gpu_checkpoint=draw(st.booleans()),
        is_merged=draw(st.booleans()),
        has_mapped_weights=draw(st.booleans()),
        trainer_gpus=tuple(range(ranks)),
        engine=draw(st.sampled_from(["embedded", "vllm", "none"])),
        policy_device=policy,
        policy_dtype=draw(st.sampled_from(["float32", "bfloat16"])),
        kv_bytes=draw(st.integers(0, 100)) * GB,
        max_running=draw(st.integers(1, 2048)),
        has_graphs=draw(st.booleans()),
        policy_gpus=tuple((first + number,) for number in range(replicas)),
        has_own_evaluation=draw(st.booleans()),
        is_shared_memory=draw(st.booleans()),
        workers=draw(st.integers(1, 32)),
    )


def capacity_of(size_gb: float) -> dict[str, int]:
    return {gpu(number): round(size_gb * GB) for number in range(8)}


@given(models(), sizes())
def test_the_sum_of_the_parts_is_the_total(model: ModelFacts, of: Sizes) -> None:
    plan = memory_plan(model, of)
    assert sum(plan.total(place) for place in plan.places) == sum(part.num_bytes for part in plan.parts)
    for place in plan.places:
        assert plan.total(place) == sum(plan.by_process(place).values())
        assert all(part.num_bytes > 0 for part in plan.parts)
    assert {MAIN_MEMORY, DISK} <= set(plan.places)


@given(models(), sizes(), st.sampled_from(["cpu", "cuda"]), st.integers(1, 4), st.booleans())
def test_a_shared_base_is_counted_once_and_one_of_each_process_otherwise(
    model: ModelFacts, of: Sizes, device: str, servers: int, has_evaluation: bool
) -> None:
    of = replace(
        of,
        trainer_device=device,
        policy_device=device,
        engine="embedded",
        policy_dtype=of.compute_dtype,
        lora=LoraSettings(),
        trainer_gpus=(0,),
        policy_gpus=((0,),) * servers,
        has_own_evaluation=has_evaluation,
    )
    shared, own = (memory_plan(model, replace(of, is_base_shared=is_shared)) for is_shared in (True, False))
    place = gpu(0) if device == "cuda" else MAIN_MEMORY
    base = DTYPE_BYTES[of.compute_dtype] * model.parameters
    owner = CONTEXT_BYTES if device == "cuda" else TORCH_PROCESS_BYTES
    assert shared.total(place, "base") == base + owner
    assert own.total(place) - shared.total(place) == servers * base - owner
    assert own.total(place, "evaluation") == shared.total(place, "evaluation"), "its own server loads whole weights"


@given(models(), sizes())
def test_each_suggested_setting_saves_what_it_says(model: ModelFacts, of: Sizes) -> None:
    """The sizes are rebuilt from the text of the suggestion, as a user would set them."""
    for place in memory_plan(model, of).places:
        found = savings(model, of, place)
        assert len(found) <= 3
        for saving in found:
            changed = applied(of, saving.setting, saving.value)
            less = memory_plan(model, of).total(place) - memory_plan(model, changed).total(place)
            assert less == saving.num_bytes > 0


def applied(of: Sizes, setting: str, value: str) -> Sizes:
    changes: dict[str, Callable[[], Sizes]] = {
        "trainer.lora.rank": lambda: replace(of, lora=LoraSettings(rank=int(value))),
        "trainer.optimizer_state": lambda: replace(of, optimizer_state=cast("OptimizerState", value.strip('"'))),
        "trainer.kl_coef": lambda: replace(of, has_reference=float(value) > 0),
        "trainer.compute_dtype": lambda: replace(of, compute_dtype=value.strip('"')),
        "inference.dtype": lambda: replace(of, policy_dtype=value.strip('"')),
        "trainer.gradient_checkpointing": lambda: replace(of, checkpointed_layers=ALL_LAYERS if value == "true" else 0),
        "trainer.max_tokens_per_microbatch": lambda: replace(of, tokens_per_pass=int(value)),
        "rollout.max_total_tokens": lambda: replace(of, longest=int(value)),
        "trainer.max_logits_mb": lambda: replace(of, logits_bytes=int(value) << 20),
        "inference.kv_memory_mb": lambda: replace(of, kv_bytes=int(value) * MB),
        "inference.transfer": lambda: replace(of, gpu_copies=0, has_mapped_weights=False, is_shared_memory=True),
        "trainer.checkpoint_copy": lambda: replace(of, has_gpu_checkpoint=value == '"gpu"'),
        "inference.forward_tokens": lambda: replace(of, forward_tokens=int(value)),
        "inference.max_running": lambda: replace(of, max_running=int(value)),
        "evaluation.policy": lambda: replace(of, has_own_evaluation=value != '"shared"'),
        "trainer.keep_checkpoints": lambda: replace(of, keep_checkpoints=int(value)),
        "rollout.workers": lambda: replace(of, workers=int(value)),
    }
    return changes[setting]()


@given(models(), sizes(), st.integers(0, 99))
def test_one_more_recomputed_layer_never_needs_more_memory(model: ModelFacts, of: Sizes, layers: int) -> None:
    fewer, more = (memory_plan(model, replace(of, checkpointed_layers=number)) for number in (layers, layers + 1))
    assert all(more.total(place) <= fewer.total(place) for place in fewer.places)
    everything = memory_plan(model, replace(of, checkpointed_layers=ALL_LAYERS))
    assert everything == memory_plan(model, replace(of, checkpointed_layers=model.layers))


DEMANDS = st.builds(Demand, kv_bytes=st.integers(0, 100 * GB), step_tokens=st.integers(1, 10**6))


@settings(max_examples=60)
@given(models(), sizes(), st.sets(st.sampled_from(FREE)), st.tuples(st.floats(1, 200), st.floats(0, 200)), DEMANDS)
def test_more_memory_never_refuses_what_less_memory_accepted(
    model: ModelFacts, of: Sizes, free: set[str], memory_gb: tuple[float, float], demand: Demand
) -> None:
    def is_accepted(size_gb: float) -> bool:
        capacity = capacity_of(size_gb)
        chosen = choose_sizes(model, of, frozenset(free), capacity, demand)
        kept = {name: getattr(of, name) for name in FREE if name not in free}
        assert {name: getattr(chosen, name) for name in kept} == kept
        return not memory_plan(model, chosen).overfull(capacity)

    less_gb, more_gb = memory_gb
    assert is_accepted(less_gb + more_gb) or not is_accepted(less_gb)


@settings(max_examples=60)
@given(models(), sizes(), st.floats(1, 300), DEMANDS)
def test_no_more_layers_are_recomputed_than_a_pass_that_fills_the_gpu_needs(
    model: ModelFacts, of: Sizes, size_gb: float, demand: Demand
) -> None:
    of, capacity = replace(of, trainer_device="cuda"), capacity_of(size_gb)
    chosen = choose_sizes(model, of, frozenset(FREE), capacity, demand)
    enough = min(filling_tokens(model), demand.step_tokens)
    assert chosen.checkpointed_layers == model.layers or chosen.tokens_per_pass >= enough
    if chosen.checkpointed_layers > 0:
        one_less = replace(of, checkpointed_layers=chosen.checkpointed_layers - 1)
        fewer = choose_sizes(model, one_less, frozenset(FREE) - {"checkpointed_layers"}, capacity, demand)
        assert fewer.tokens_per_pass < enough or memory_plan(model, fewer).overfull(capacity)


@given(models(), sizes(), st.floats(1, 300), DEMANDS)
def test_chosen_sizes_are_not_larger_than_the_run_can_use(
    model: ModelFacts, of: Sizes, size_gb: float, demand: Demand
) -> None:
    chosen = choose_sizes(model, of, frozenset(FREE), capacity_of(size_gb), demand)
    assert chosen.kv_bytes <= demand.kv_bytes
    assert 1 <= chosen.tokens_per_pass <= demand.step_tokens


@settings(max_examples=10, deadline=None)
@given(models(), st.integers(2, 4), st.floats(10, 200), st.sampled_from(["embedded", "vllm"]), DEMANDS)
def test_a_division_uses_every_gpu_once_and_more_gpus_never_refuse(
    model: ModelFacts, count: int, size_gb: float, engine: Engine, demand: Demand
) -> None:
    of = Sizes(
        trainer_device="cuda", compute_dtype="bfloat16", policy_device="cuda", policy_dtype="bfloat16", engine=engine
    )
    config = load_config(DEMO).config

    def fits(gpus: int) -> bool:
        capacity = {gpu(number): round(size_gb * GB) for number in range(gpus)}
        found = best_division(model, config, of, free=frozenset(FREE), capacity=capacity, demand=demand)
        assert (*found.trainer_gpus, *found.policy_gpus) == tuple(range(gpus))
        assert len(found.policy_gpus) % found.replicas == 0
        chosen = choose_sizes(model, with_division(of, found), frozenset(FREE), capacity, demand)
        return not memory_plan(model, chosen).overfull(capacity)

    assert fits(count + 1) or not fits(count)
