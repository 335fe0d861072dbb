"""A trained adapter in bfloat16: engine and trainer compute the same, the whole update reaches the sampler, and it learns."""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rollbook.contracts.policy import Publication, PublicationId, SamplingParams
from rollbook.contracts.weights import AdapterKind
from rollbook.inference.config import InferenceConfig
from rollbook.inference.engines.embedded.adapters import POLICY, AdapterRows
from rollbook.inference.engines.embedded.engine import TransformersEngine, open_engine
from rollbook.inference.weights.lora import checked_settings, low_rank_pairs
from rollbook.trainer.checkpoints.checkpoints import initial_learner
from rollbook.trainer.config import LoraSettings
from rollbook.trainer.model_config import ModelBuildConfig
from rollbook.trainer.step import TrainStep
from tests.parts.trainer.batches import BUILD, one_pass, quick, recorded_batch, tiny_model_dir

WIDE: ModelBuildConfig = BUILD.model_copy(
    update={"hidden_size": 64, "heads": 4, "kv_heads": 2, "intermediate_size": 128, "initializer_range": 0.02}
)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))]
RATE_OF_8B = 1e-5
"""The default rate of an 8B model with LoRA: the smaller the rate, the more a merge into bfloat16 loses."""


def lora_learner(model_dir: Path, *, device: str, **settings: Any) -> TrainStep:
    torch.set_num_threads(1)
    lora = LoraSettings(rank=16, alpha=32)
    return initial_learner(model_dir, quick(lora=lora, compute_dtype="bfloat16", device=device, **settings))


async def publish(engine: TransformersEngine, learner: TrainStep, kind: AdapterKind) -> None:
    current = engine.publication
    number = PublicationId(1 if current is None else current.id + 1)
    publication = Publication(id=number, epoch=1, step=learner.step, digest=learner.model.digest())
    await engine.load_tensors(publication, learner.snapshot(), adapter=kind.published(number))
    assert await engine.weights_digest() == publication.digest


def matrices(
    engine: TransformersEngine, learner: TrainStep
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """For each adapted matrix: what the engine adds to it, what the trainer has learned, and the base."""
    settings, tensors = learner.publish_adapters().settings, learner.snapshot()
    bank: Any = engine.parts.model.adapters
    for pair in low_rank_pairs(checked_settings(settings), tensors):
        learned_OI = (tensors[pair.b].float() @ tensors[pair.a].float() * pair.scale).cpu()
        place = bank._places[pair.target.removesuffix(".weight")]
        factors = bank._factors[place.group]
        eye_II = torch.eye(learned_OI.shape[1], dtype=torch.bfloat16, device=factors.a_LPRE.device)
        added_IO = torch.zeros(len(eye_II), factors.b_LPRO.shape[-1], dtype=torch.bfloat16, device=eye_II.device)
        with torch.inference_mode():
            bank.add(place.group, added_IO, eye_II, AdapterRows(POLICY))
        base_OI = engine.parts.module.get_parameter(pair.target).detach().cpu()
        yield added_IO[:, place.columns].T.float().cpu(), learned_OI, base_OI


def shares(engine: TransformersEngine, learner: TrainStep) -> tuple[float, float]:
    """The share of the learned update that reaches the sampler, and the share that a merge would have kept."""
    reached = merged = whole = 0.0
    for added, learned, base in matrices(engine, learner):
        kept = (base.float() + learned).to(torch.bfloat16).float() - base.float()
        reached += float((added * learned).sum())
        merged += float((kept * learned).sum())
        whole += float((learned * learned).sum())
    return reached / whole, merged / whole


async def difference(engine: TransformersEngine, learner: TrainStep) -> float:
    """Mean absolute difference of the logprobs of engine and trainer."""
    prompts = [[1, 4 + n % 12, 4 + (5 * n) % 12] for n in range(24)]
    completions = await asyncio.gather(
        *(engine.generate(prompt, SamplingParams(max_tokens=16, seed=n)) for n, prompt in enumerate(prompts))
    )
    rows = [[*p, *c.token_ids.tolist()] for p, c in zip(prompts, completions, strict=True)]
    at, width = list(range(2, 18)), 18
    micro = one_pass(
        [tokens[:-1] for tokens in rows],
        [n * width + position for n in range(len(rows)) for position in at],
        [tokens[position + 1] for tokens in rows for position in at],
    )
    with torch.no_grad():
        ours = learner.model.token_logprobs(micro)[0].float().cpu().numpy()
    theirs = np.concatenate([completion.logprobs for completion in completions])
    return float(np.abs(ours - theirs).mean())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "checked", [(5, 20), pytest.param((100, 500), marks=[pytest.mark.slow, pytest.mark.timeout(300)])]
)
async def test_the_engine_samples_from_the_trained_adapter(
    tmp_path: Path, device: str, checked: tuple[int, ...], record_property: Callable[[str, object], None]
) -> None:
    model_dir = tiny_model_dir(tmp_path / "model", build=WIDE)
    learner = lora_learner(model_dir, device=device, lr=RATE_OF_8B)
    kind = learner.publish_adapters()
    config = InferenceConfig(dtype="bfloat16", device=device, publish="adapter", max_running=32, kv_memory_mb=50)
    async with open_engine(config, model_dir) as engine:
        await publish(engine, learner, kind)
        noise = await difference(engine, learner)
        for step in range(1, max(checked) + 1):
            learner.run(recorded_batch(step))
            if step not in checked:
                continue
            await publish(engine, learner, kind)
            reached, merged = shares(engine, learner)
            found = await difference(engine, learner)
            record_property(f"{step} steps", {"reached": reached, "merged": merged, "difference": found, "base": noise})
            assert 0.99 <= reached <= 1.01
            assert found < 2 * noise + 1e-4, "as far apart as with the base alone"
            if step == 5:
                assert merged < 0.6, "a merge would have lost half of the update"
