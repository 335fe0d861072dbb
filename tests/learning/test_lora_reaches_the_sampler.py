"""A trained adapter in bfloat16: engine and trainer compute the same, the whole update reaches the sampler, and it learns."""

import asyncio
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rollbook.contracts.batch import TrainingBatch
from rollbook.contracts.policy import Completion, Publication, PublicationId, SamplingParams
from rollbook.contracts.trajectory import RolloutSample
from rollbook.contracts.weights import AdapterKind
from rollbook.inference.config import InferenceConfig
from rollbook.inference.engines.embedded.adapters import POLICY, AdapterRows
from rollbook.inference.engines.embedded.engine import TransformersEngine, open_engine
from rollbook.inference.weights.lora import checked_settings, low_rank_pairs
from rollbook.trainer.checkpoints.checkpoints import initial_learner
from rollbook.trainer.config import LoraSettings
from rollbook.trainer.model_config import ModelBuildConfig
from rollbook.trainer.step import TrainStep
from tests.parts.trainer.batches import BUILD, batch_of, one_pass, quick, recorded_batch, row, sample, tiny_model_dir

WIDE: ModelBuildConfig = BUILD.model_copy(
    update={"hidden_size": 64, "heads": 4, "kv_heads": 2, "intermediate_size": 128, "initializer_range": 0.02}
)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))]
LORA = LoraSettings(rank=16, alpha=32)
RATE_OF_8B = 1e-5
"""The default rate of an 8B model with LoRA: the smaller the rate, the more a merge into bfloat16 loses."""

log = logging.getLogger(__name__)


def lora_learner(model_dir: Path, *, device: str, **settings: Any) -> TrainStep:
    torch.set_num_threads(1)
    return initial_learner(model_dir, quick(lora=LORA, compute_dtype="bfloat16", device=device, **settings))


async def publish(engine: TransformersEngine, learner: TrainStep, kind: AdapterKind | None) -> None:
    """`kind` is None: whole weights."""
    current = engine.publication
    number = PublicationId(1 if current is None else current.id + 1)
    publication = Publication(id=number, epoch=1, step=learner.step, digest=learner.model.digest())
    adapter = None if kind is None else kind.published(number)
    await engine.load_tensors(publication, learner.snapshot(), adapter=adapter)
    assert kind is None or await engine.weights_digest() == publication.digest


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
    "checked", [(5, 20), pytest.param((100, 500), marks=[pytest.mark.slow, pytest.mark.timeout(900)])]
)
async def test_the_engine_samples_from_the_trained_adapter(
    tmp_path: Path, device: str, checked: tuple[int, ...]
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
            log.info(
                "%d steps: share %.4f (merged %.4f), difference %.5f (base %.5f)", step, reached, merged, found, noise
            )
            assert 0.99 <= reached <= 1.01
            assert found < 2 * noise + 1e-4, "as far apart as with the base alone"
            if step == 5:
                assert merged < 0.6, "a merge would have lost half of the update"


class Copying:
    """Reply with the first of two words. Some pairs are never trained on."""

    def __init__(self) -> None:
        pairs = [[1, first, second] for first in range(4, 12) for second in range(4, 12)]
        order = np.random.default_rng(0).permutation(len(pairs))
        self.held_out = [pairs[at] for at in order[:12]]
        self.trained = [pairs[at] for at in order[12:]]

    async def accuracy(self, engine: TransformersEngine) -> float:
        greedy = SamplingParams(max_tokens=1, temperature=0.0)
        replies = await asyncio.gather(*(engine.generate(prompt, greedy) for prompt in self.held_out))
        return float(np.mean([r.token_ids[0] == p[1] for r, p in zip(replies, self.held_out, strict=True)]))

    async def play(self, engine: TransformersEngine, step: int, rng: np.random.Generator) -> TrainingBatch:
        prompts = [self.trained[at] for at in rng.choice(len(self.trained), 8, replace=False)]
        groups = []
        for number, prompt in enumerate(prompts):
            sampling = [SamplingParams(max_tokens=1, seed=64 * step + 8 * number + n) for n in range(8)]
            replies = await asyncio.gather(*(engine.generate(prompt, one) for one in sampling))
            groups.append([_scored(prompt, reply) for reply in replies])
        return batch_of(step, groups)


def _scored(prompt: list[int], reply: Completion) -> RolloutSample:
    token_row = row([*prompt, int(reply.token_ids[0])], [3])
    token_row.logprobs[3] = reply.logprobs[0]
    return sample(token_row, reward=float(reply.token_ids[0] == prompt[1]))


async def learned(directory: Path, *, seed: int, is_lora: bool) -> tuple[float, float]:
    """Held-out accuracy before and after training, with an engine in bfloat16 as the sampler."""
    model_dir = tiny_model_dir(directory, build=WIDE, seed=seed)
    settings = {"compute_dtype": "bfloat16", "lr": 3e-3, "old_logprobs": "engine", "seed": seed}
    learner = initial_learner(model_dir, quick(lora=LORA if is_lora else None, **settings))
    kind = learner.publish_adapters() if is_lora else None
    task, rng = Copying(), np.random.default_rng(seed)
    async with open_engine(InferenceConfig(dtype="bfloat16"), model_dir) as engine:
        await publish(engine, learner, kind)
        before = await task.accuracy(engine)
        for step in range(1, 101):
            learner.run(await task.play(engine, step, rng))
            await publish(engine, learner, kind)
        return before, await task.accuracy(engine)


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_lora_learns_what_training_all_weights_learns(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    ends: dict[bool, list[float]] = {True: [], False: []}
    for seed in range(3):
        for is_lora, accuracies in ends.items():
            before, after = await learned(tmp_path / f"{seed}-{is_lora}", seed=seed, is_lora=is_lora)
            log.info("seed %d, %s: held-out accuracy %.2f to %.2f", seed, "LoRA" if is_lora else "full", before, after)
            accuracies.append(after)
            if is_lora:
                assert after >= before + 0.25, f"seed {seed}"
    assert np.mean(ends[True]) > 0.8 * np.mean(ends[False])
