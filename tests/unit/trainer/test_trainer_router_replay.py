"""Router replay: experts sampled by a real engine, stored in frames, and used by a real trainer."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rollbook.contracts.batch import TrainingBatch
from rollbook.contracts.errors import RunError
from rollbook.contracts.group import PromptGroup, group_id
from rollbook.contracts.group_codec import decode_group, encode_group
from rollbook.contracts.policy import Publication, PublicationId, SamplingParams
from rollbook.contracts.task import TaskId
from rollbook.contracts.trajectory import RolloutSample
from rollbook.inference.config import InferenceConfig
from rollbook.inference.engines.embedded.engine import open_engine
from rollbook.rollout.assemblers.tokens import TrajectoryAssembler
from rollbook.trainer.checkpoints.checkpoints import initial_learner
from rollbook.trainer.config import LoraSettings
from rollbook.trainer.data.minibatches import plan_minibatch
from rollbook.trainer.data.rows import flatten
from rollbook.trainer.model.policy_model import PolicyModel
from rollbook.trainer.model.routers import is_router
from tests.models.families import VOCABULARY, family
from tests.parts.trainer.batches import batch_of, quick, recorded_batch


def sampled(directory: Path, *, dtype: str = "bfloat16") -> list[RolloutSample]:
    """Episodes of two turns, as frames hold them. In bfloat16 the engine decides near ties unlike a trainer in float32."""
    config = InferenceConfig(
        max_running=4, max_model_len=128, kv_memory_mb=20, prefix_cache_least=8, record_routes=True, dtype=dtype
    )

    async def play() -> list[RolloutSample]:
        async with open_engine(config, directory) as engine:
            await engine.adopt(Publication(id=PublicationId(1), epoch=1, step=0, digest=""))

            async def episode(number: int) -> RolloutSample:
                rng = np.random.default_rng(number)
                sampling = SamplingParams(max_tokens=(6, 14)[number % 2], seed=number)
                assembler = TrajectoryAssembler(sampling)
                assembler.add_prompt(rng.integers(3, VOCABULARY, 5 + 3 * number).tolist())
                for _ in range(2):
                    assembler.add_completion(await engine.generate(assembler.prompt_ids, sampling))
                    assembler.add_observation([5, 6, 7])
                return assembler.build(reward=float(number % 2))

            return list(await asyncio.gather(*(episode(number) for number in range(8))))

    samples = tuple(asyncio.run(play()))
    group = PromptGroup(id=group_id(TaskId("t"), 1), task_id=TaskId("t"), draw=1, samples=samples)
    return list(decode_group(encode_group(group).payload).samples)


def saved(root: Path, kind: str) -> Path:
    """A model whose routers give two experts nearly equal scores, so that rounding decides between them."""
    model = family(kind).model()
    with torch.no_grad():
        for part in model.modules():
            if is_router(part):
                part.weight[1] = part.weight[0] + 1e-3 * torch.randn_like(part.weight[0])
    model.save_pretrained(root / kind)
    return root / kind


def batch(samples: Sequence[RolloutSample]) -> TrainingBatch:
    return batch_of(1, [samples[:4], samples[4:]])


@pytest.mark.parametrize(
    ("kind", "is_checkpointing"),
    [
        ("qwen3_moe", True),
        ("gpt_oss", False),
        pytest.param("qwen3_moe", False, marks=pytest.mark.slow),
        pytest.param("deepseek_v3", True, marks=pytest.mark.slow),
    ],
)
def test_replay_uses_every_recorded_choice_and_brings_the_trainer_closer_to_the_sampler(
    tmp_path: Path, kind: str, is_checkpointing: bool
) -> None:
    directory = saved(tmp_path, kind)
    learner = initial_learner(directory, quick(router_replay=True, gradient_checkpointing=is_checkpointing))
    received: list[torch.Tensor] = []
    for part in learner.model.network.modules():
        if type(part).__name__.endswith("Experts"):
            part.register_forward_pre_hook(lambda _module, args: received.append(args[1].sort(dim=-1).values))
    samples = sampled(directory)
    rows = flatten(batch(samples), quick(router_replay=True))
    (micro,) = plan_minibatch(rows, quick(), is_packed=learner.model.is_packed).microbatches
    logprobs, _ = learner.model.token_logprobs(micro)
    total: Any = logprobs.sum()
    total.backward()
    assert micro.routes_TLK is not None
    is_token = micro.routes_TLK[:, 0, 0] != 255
    assert is_token.sum() == micro.inputs_BT.size - micro.num_padding
    layers = list(range(micro.routes_TLK.shape[1]))
    # The backward pass with checkpointing computes the layers again, last layer first.
    for found, layer in zip(received, layers + layers[::-1] * is_checkpointing, strict=True):
        np.testing.assert_array_equal(found[is_token].numpy(), micro.routes_TLK[is_token, layer])
    metrics = learner.run(batch(samples)).metrics
    assert metrics["train/router_replayed"] == 1.0
    assert 0 < (metrics["train/router_mismatch"] or 0) < 0.5
    before, after = metrics["train/own_routes_kl"], metrics["train/replayed_kl"]
    assert before is not None
    assert after is not None
    assert after < max(0.5 * before, 1e-4), "where the sampler chose nearly equal experts, rounding is all that is left"


def test_replay_of_equal_choices_changes_no_bit_and_the_router_is_trained(tmp_path: Path) -> None:
    directory = saved(tmp_path, "qwen3_moe")
    samples = sampled(directory, dtype="float32")
    weights: list[dict[str, torch.Tensor]] = []
    for is_replayed in (False, True):
        learner = initial_learner(directory, quick(router_replay=is_replayed))
        report = learner.run(batch(samples))
        weights.append(dict(learner.snapshot()))
    assert report.metrics["train/router_mismatch"] == 0.0
    plain, replayed = weights
    assert all(torch.equal(plain[name], replayed[name]) for name in plain)
    before = PolicyModel.load(directory, quick()).snapshot()
    assert any(name.endswith("mlp.gate.weight") and not torch.equal(w, before[name]) for name, w in replayed.items())


def test_gradients_flow_to_the_router_through_the_gate_weights_of_choices_that_are_not_its_own(tmp_path: Path) -> None:
    directory = saved(tmp_path, "qwen3_moe")
    model = PolicyModel.load(directory, quick(router_replay=True))
    rows = flatten(batch(sampled(directory)), quick(router_replay=True))
    (micro,) = plan_minibatch(rows, quick(), is_packed=model.is_packed).microbatches
    assert micro.routes_TLK is not None
    own, _ = model.token_logprobs(micro, is_replayed=False)
    # All choices are the next experts: none is that of the sampler.
    other = np.sort((micro.routes_TLK + 1) % 4, axis=-1).astype(np.uint8)
    replayed, _ = model.token_logprobs(_with_routes(micro, other))
    assert float((own - replayed).detach().abs().max()) > 0.01
    total: Any = replayed.sum()
    total.backward()
    gates = [p for name, p in model.module.named_parameters() if name.endswith("mlp.gate.weight")]
    assert len(gates) == 2
    assert all(p.grad is not None and float(p.grad.abs().max()) > 0 for p in gates)


def _with_routes(micro: Any, routes: Any) -> Any:
    return type(micro)(**{name: getattr(micro, name) for name in micro.__slots__} | {"routes_TLK": routes})


def test_rows_without_routes_use_the_trainers_own_choices_and_are_counted(tmp_path: Path) -> None:
    directory = saved(tmp_path, "qwen3_moe")
    samples = sampled(directory)
    plain = [_without_routes(sample) for sample in samples[:4]]
    learner = initial_learner(directory, quick(router_replay=True))
    assert 0 < (learner.run(batch([*plain, *samples[4:]])).metrics["train/router_replayed"] or 0) < 1
    with pytest.raises(RunError, match=r"batch 2 has no routes.*inference\.record_routes = true"):
        learner.run(recorded_batch(2))


def _without_routes(sample: RolloutSample) -> RolloutSample:
    rows = tuple(type(row)(**{n: getattr(row, n) for n in row.__slots__} | {"columns": {}}) for row in sample.sequences)
    return RolloutSample(sequences=rows, reward=sample.reward, sampling=sample.sampling, turns=sample.turns)


def test_routes_of_another_model_are_refused_before_the_step(tmp_path: Path) -> None:
    directory = saved(tmp_path, "qwen3_moe")
    first, *others = sampled(directory)
    row = first.sequences[0]
    assert row.routes is not None
    for wrong in (row.routes[:, :1], np.full_like(row.routes, 17)):
        changed = RolloutSample(sequences=(row.with_columns(routes=wrong),), reward=1.0, sampling=first.sampling)
        learner = initial_learner(directory, quick(router_replay=True))
        with pytest.raises(RunError, match=r"the model has 2 layers of 4 experts"):
            learner.run(batch([changed, *others]))


def test_experts_with_adapters_are_replayed(tmp_path: Path) -> None:
    directory = saved(tmp_path, "qwen3_moe")
    learner = initial_learner(directory, quick(router_replay=True, lora=LoraSettings(experts=True)))
    metrics = learner.run(batch(sampled(directory))).metrics
    assert metrics["train/router_replayed"] == 1.0
    assert (metrics["train/router_mismatch"] or 0) > 0


@pytest.mark.parametrize(
    ("kind", "reason"),
    [("qwen3", "has no experts"), ("phimoe", "does not choose its experts by one torch.topk")],
)
def test_a_model_that_cannot_be_replayed_is_refused_at_the_start_by_its_type(
    tmp_path: Path, kind: str, reason: str
) -> None:
    with pytest.raises(RunError, match=f"{kind!r}.*{reason}"):
        PolicyModel.load(saved(tmp_path, kind), quick(router_replay=True))
