"""Two ranks that train one model: same result as one, exact resume, and resume with another number of ranks."""

import asyncio
import copy
import multiprocessing
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rollbook.contracts.batch import PassSplit
from rollbook.contracts.policy import Publication, PublicationId
from rollbook.inference.config import InferenceConfig
from rollbook.inference.engines.embedded.engine import open_engine
from rollbook.telemetry.events import EventLog
from rollbook.telemetry.metrics import MetricRecorder
from rollbook.trainer.checkpoints.checkpoints import Checkpoints
from rollbook.trainer.checkpoints.settings_history import SettingsHistory
from rollbook.trainer.config import LoraSettings
from rollbook.trainer.loop import LoopEnd
from rollbook.trainer.model.weights import digest_of, write_weights
from rollbook.trainer.sft import SFT_METRICS, SftLoop
from rollbook.trainer.sft_config import SftConfig
from rollbook.trainer.team import Team
from tests.models.families import family
from tests.parts.concurrency.processes import descendants_running
from tests.parts.ledger.groups import RUN
from tests.parts.ledger.groups import settings as ledger_settings
from tests.parts.ledger.service import serving
from tests.parts.trainer import process as trainer_process
from tests.parts.trainer.batches import quick, recorded_batch, row, tiny_model_dir
from tests.parts.trainer.ledger import GROUPS, FakeReplicas, TinyLoop, open_trainer_ledger, submit_batches

CLOSE = 2e-5
"""Sums over ranks have another order than in one process; after four steps with lr 1e-2 weights agree to this."""


def train(
    tmp_path: Path,
    name: str,
    *,
    steps: int,
    ranks: int,
    publishes_adapters: bool = False,
    probes: bool = False,
    model_dir: Path | None = None,
    **settings: object,
) -> tuple[dict[str, torch.Tensor], dict[int, str]]:
    """Train in a directory from its last checkpoint; returns the weights and their digest at every step."""
    config = quick(ranks=ranks, ppo_n_minibatches=2, max_tokens_per_microbatch=60, **settings)
    directory = model_dir or tiny_model_dir(tmp_path / "model")
    checkpoints = Checkpoints(tmp_path / name, model_dir=directory, config=config)
    latest = checkpoints.latest()
    learner = (
        checkpoints.restore(latest)
        if ranks == 1
        else Team.assemble(checkpoints, latest, size=ranks, device=config.device)
    )
    try:
        digests = {}
        if publishes_adapters:
            learner.publish_adapters()
        if probes:
            learner.probe(PassSplit(max_tokens=200, gradient_checkpointing=True))
        while learner.step < steps:
            learner.run(recorded_batch(learner.step + 1))
            digests[learner.step] = digest_of(learner.snapshot())
        weights = learner.snapshot()
        checkpoints.write(learner.state_snapshot(weights), weights_digest=digest_of(weights))
        return copy.deepcopy(dict(weights)), digests
    finally:
        learner.close()


@pytest.mark.slow
async def test_experts_of_two_ranks_are_published_and_resumed_under_the_names_of_the_files(tmp_path: Path) -> None:
    directory = tmp_path / "mixture"
    family("qwen3_moe").model().save_pretrained(directory)
    one, _ = await asyncio.to_thread(train, tmp_path, "one", steps=2, ranks=1, model_dir=directory)
    two, digests = await asyncio.to_thread(train, tmp_path, "two", steps=2, ranks=2, model_dir=directory)
    require_close(two, one)
    assert two.keys() == load_file(directory / "model.safetensors").keys()
    resumed, later = await asyncio.to_thread(train, tmp_path, "two", steps=3, ranks=2, model_dir=directory)
    alone, _ = await asyncio.to_thread(train, tmp_path, "one", steps=3, ranks=1, model_dir=directory)
    require_close(resumed, alone)
    # The checkpoint of two ranks is one for any number of them.
    again, _ = await asyncio.to_thread(train, tmp_path, "two", steps=3, ranks=1, model_dir=directory)
    assert digest_of(again) == later[3] != digests[2]
    write_weights(resumed, tmp_path / "published.safetensors", digest=later[3])
    async with open_engine(InferenceConfig(max_model_len=64, kv_memory_mb=5), directory) as engine:
        publication = Publication(id=PublicationId(1), epoch=1, step=3, digest=later[3])
        await engine.load_weights(publication, tmp_path / "published.safetensors")
        assert await engine.weights_digest() == later[3]


@pytest.mark.slow
@pytest.mark.parametrize("gradient_checkpointing", [False, True])
def test_two_ranks_learn_the_gated_delta_layers_of_one(tmp_path: Path, gradient_checkpointing: bool) -> None:
    directory = tmp_path / "delta"
    family("qwen3_5_text").model().save_pretrained(directory)
    alone, _ = train(tmp_path, "alone", steps=2, ranks=1, model_dir=directory)
    recomputed = {"gradient_checkpointing": gradient_checkpointing}
    two, _ = train(tmp_path, "two", steps=2, ranks=2, model_dir=directory, **recomputed)
    require_close(two, alone)


def require_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-3, atol=CLOSE)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_ranks_learn_what_one_does_and_resume_to_the_bit_or_within_rounding(tmp_path: Path) -> None:
    alone, _ = train(tmp_path, "alone", steps=4, ranks=1)
    whole, whole_digests = train(tmp_path, "whole", steps=4, ranks=2)
    require_close(whole, alone)
    _, first = train(tmp_path, "halves", steps=2, ranks=2)
    shutil.copytree(tmp_path / "halves", tmp_path / "fewer")
    _, second = train(tmp_path, "halves", steps=4, ranks=2)
    assert {**first, **second} == whole_digests, "a resume with as many ranks is exact"
    fewer, _ = train(tmp_path, "fewer", steps=4, ranks=1)
    require_close(fewer, alone)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_trial_pass_of_two_ranks_changes_nothing(tmp_path: Path) -> None:
    _, expected = train(tmp_path, "plain", steps=2, ranks=2)
    _, found = train(tmp_path, "tried", steps=2, ranks=2, probes=True)
    assert found == expected


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("publishes_adapters", [True, False], ids=["adapters published", "merged weights published"])
def test_two_ranks_learn_the_adapters_of_one_and_resume_from_its_checkpoint(
    tmp_path: Path, publishes_adapters: bool
) -> None:
    lora: dict[str, Any] = {
        "lora": LoraSettings(rank=4, alpha=8),
        "kl_coef": 0.1,
        "publishes_adapters": publishes_adapters,
    }
    train(tmp_path, "alone", steps=2, ranks=1, **lora)
    expected, _ = train(tmp_path, "whole", steps=4, ranks=1, **lora)
    _, digests = train(tmp_path, "pair", steps=4, ranks=2, **lora)
    _, first = train(tmp_path, "halves", steps=2, ranks=2, **lora)
    shutil.copytree(tmp_path / "halves", tmp_path / "fewer")
    pair, second = train(tmp_path, "halves", steps=4, ranks=2, **lora)
    assert {**first, **second} == digests, "a resume with as many ranks is exact"
    require_close(pair, expected)
    for name, ranks in (("fewer", 1), ("alone", 2)):
        resumed, _ = train(tmp_path, name, steps=4, ranks=ranks, **lora)
        require_close(resumed, expected)
    saved: Any = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(tmp_path / "model"), str(tmp_path / "pair" / "step-000004" / "model")
    )
    assert saved.peft_config["default"].r == 4


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_fine_tuning_with_two_ranks_gives_the_losses_of_one(tmp_path: Path) -> None:
    demonstrations = [row([1, 5, 6, 7, 2], [3, 4]), row([1, 8, 9, 2], [2, 3]), row([1, 4, 4, 4, 4, 2], [4, 5])]
    losses = []
    for ranks in (1, 2):
        directory = tmp_path / str(ranks)
        directory.mkdir()
        outcome = SftLoop(
            config=SftConfig(data="unused", examples_per_step=3, epochs=3),
            trainer=quick(ranks=ranks),
            model_dir=tiny_model_dir(tmp_path / "model"),
            directory=directory,
            demonstrations=demonstrations,
            validation=demonstrations[:1],
            metrics=MetricRecorder("sft", SFT_METRICS, None),
            log=EventLog("sft"),
        ).run()
        assert (outcome.is_finished, outcome.steps, outcome.checkpoint.step) == (True, 3, 3)
        losses.append((outcome.first_loss, outcome.last_loss, outcome.eval_loss))
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)


@pytest.mark.timeout(600)
async def test_the_loop_trains_on_two_ranks_and_leaves_no_process_behind(tmp_path: Path) -> None:
    async with open_trainer_ledger() as ledger:
        await ledger.create(max_steps=3)
        outcome = await TinyLoop(ledger.source(), FakeReplicas(), tmp_path, quick(ranks=2)).run()
        assert (outcome.end, outcome.step, await ledger.durable_step()) == (LoopEnd.ENDED, 3, 3)
        assert set(await ledger.acknowledged()) == {1, 2, 3}
    assert descendants_running("rollbook.trainer.team") == []
    assert not dist.is_initialized()


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_a_rank_that_runs_out_of_memory_makes_all_ranks_train_the_step_with_smaller_passes(
    tmp_path: Path,
) -> None:
    settings = {
        "ranks": 2,
        "max_tokens_per_microbatch": 60,
        "loss": "tests.parts.trainer.losses:of_a_small_second_rank",
        "loss_options": {"max_trained": 20.0},
        "advantage": "group",
        "reduction": "token_mean",
    }
    context = multiprocessing.get_context("spawn")
    tiny_model_dir(tmp_path / "run" / "model")
    async with serving(tmp_path / "ledger") as (url, ledger):
        await ledger.create_run(RUN, ledger_settings(per_step=GROUPS, max_steps=2))
        await submit_batches(ledger, (1, 2))
        codes: list[int | None] = []
        while not codes or (codes[-1] != 0 and len(codes) < 3):
            process = context.Process(target=trainer_process.train, args=(url, RUN, str(tmp_path / "run"), settings))
            process.start()
            await asyncio.to_thread(process.join)
            codes.append(process.exitcode)
        steps = await ledger.steps(RUN)
    assert codes[-1] == 0
    failed = SettingsHistory.read(tmp_path / "run" / "trainer_state.json").out_of_memory
    assert len(failed) == len(codes) - 1 >= 1
    assert "does not fit into the memory of trainer rank 1 (cpu)" in failed[0].cause
    assert {step.step: step.split for step in steps}[failed[-1].step] == failed[-1].retried
    assert descendants_running("rollbook.trainer.team") == []
