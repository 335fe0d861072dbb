"""A step that does not fit into memory is trained with smaller passes; the split is recorded, and a resume uses it."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rollbook.contracts.batch import AckReceipt, PassSplit
from rollbook.contracts.errors import RunError
from rollbook.telemetry.events import EventLog, read_json_lines
from rollbook.telemetry.metrics import MetricRecorder, read_metrics
from rollbook.trainer.checkpoints.checkpoints import initial_learner
from rollbook.trainer.checkpoints.settings_history import (
    SMALLER_STEPS,
    PassSplits,
    SettingsHistory,
    split_settings,
)
from rollbook.trainer.data.minibatches import smaller_split
from rollbook.trainer.data.probe import probe_pass, smaller_probe
from rollbook.trainer.loop import LoopEnd
from rollbook.trainer.memory_errors import StepMemoryError
from rollbook.trainer.replay import replay
from rollbook.trainer.sft import SFT_METRICS, SftLoop, SftOutcome
from rollbook.trainer.sft_config import SftConfig
from rollbook.trainer.step import TrainStep
from tests.parts.ledger.groups import RUN
from tests.parts.trainer.batches import batch_of, quick, recorded_batch, row, sample, tiny_model_dir
from tests.parts.trainer.ledger import FakeReplicas, TinyLoop, TrainerLedger, open_trainer_ledger
from tests.parts.trainer.memory import small_device

WHOLE = PassSplit(max_tokens=200)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir(tmp_path_factory.mktemp("tiny") / "model")


async def splits_of(ledger: TrainerLedger) -> dict[int, PassSplit | None]:
    return {record.step: record.split for record in await ledger.ledger.steps(RUN)}


async def replayed(ledger: TrainerLedger, directory: Path, steps: int, **settings: object) -> dict[int, str]:
    """The digests of a training that splits each batch as recorded from the start."""
    splits = await splits_of(ledger)
    batches = [replace(recorded_batch(step), split=splits[step]) for step in range(1, steps + 1)]
    made = await replay(batches, model_dir=directory / "model", config=quick(**settings))
    return {step: digest for step, digest in made.digests.items() if step > 0}


def weights_and_state(learner: TrainStep) -> tuple[str, list[torch.Tensor]]:
    state = learner.optimizer.state_dict()["state"]
    return learner.model.digest(), [value for held in state.values() for value in held.values()]


async def test_a_step_that_does_not_fit_is_trained_with_smaller_passes_and_checkpointing(tmp_path: Path) -> None:
    async with open_trainer_ledger() as ledger:
        await ledger.create(max_steps=3)
        with small_device(20) as sizes:
            loop = TinyLoop(ledger.source(), FakeReplicas(), tmp_path, quick(max_tokens_per_microbatch=200))
            outcome = await loop.run()
        splits = await splits_of(ledger)
        assert outcome.end is LoopEnd.ENDED
        first = splits[1]
        assert first is not None
        assert (first.gradient_checkpointing, first.max_tokens <= 20) == (True, True)
        assert set(splits.values()) == {first}, "later steps begin with passes that fit"
        assert sum(size > 20 for size in sizes) == 2
        assert await ledger.acknowledged() == await replayed(ledger, tmp_path, 3, max_tokens_per_microbatch=200)
    failed = SettingsHistory.read(tmp_path / "trainer_state.json").out_of_memory
    assert [attempt.step for attempt in failed] == [1, 1]
    assert (failed[0].failed, failed[-1].retried) == (WHOLE, first)
    events = [e for e in read_json_lines(tmp_path / "logs" / "trainer.jsonl") if e["event"] == "trainer.out_of_memory"]
    assert events[0]["failed"] == "passes of 200 tokens"
    rows = read_metrics(tmp_path / "metrics.jsonl")
    names = ("perf/out_of_memory", "perf/failed_pass_tokens", "perf/pass_tokens")
    reported = [[line.get(name) for name in names] for line in rows]
    assert reported == [[2, 200, first.max_tokens], [0, None, first.max_tokens], [0, None, first.max_tokens]]


@pytest.mark.parametrize("compute_dtype", ["float32", "bfloat16"])
def test_nothing_of_a_failed_attempt_is_kept(model_dir: Path, compute_dtype: str) -> None:
    config = quick(max_tokens_per_microbatch=20, compute_dtype=compute_dtype)
    learner, other = initial_learner(model_dir, config), initial_learner(model_dir, config)
    for trained in (learner, other):
        trained.run(recorded_batch(1))
    before = learner.model.digest()
    with small_device(0, fits_first=2) as sizes, pytest.raises(StepMemoryError) as failure:
        learner.run(recorded_batch(2))
    assert len(sizes) == 3, "two passes left gradients"
    assert all(parameter.grad is None for parameter in learner.model.parameters())
    assert (learner.step, learner.model.digest(), failure.value.can_retry) == (1, before, True)
    smaller = failure.value.smaller
    assert smaller is not None
    for trained in (learner, other):
        trained.run(replace(recorded_batch(2), split=smaller))
    digest, state = weights_and_state(learner)
    expected, expected_state = weights_and_state(other)
    assert digest == expected
    assert all(torch.equal(*pair) for pair in zip(state, expected_state, strict=True))


def test_gradients_that_a_failed_backward_pass_left_at_the_shadow_are_freed(model_dir: Path) -> None:
    model = initial_learner(model_dir, quick(compute_dtype="bfloat16")).model
    shadows = [shadow for _, shadow in model._shadows]
    shadows[0].grad = torch.ones_like(shadows[0])
    model.discard_gradients()
    assert all(shadow.grad is None for shadow in shadows)


@pytest.mark.parametrize(
    ("starts", "sizes"),
    [((4, 4, 4, 4, 4), [10, 10]), ((4, 5, 6, 7, 8), [36, 18, 10])],
    ids=["shared prefix", "different"],
)
def test_passes_are_halved_down_to_the_longest_sequence(
    model_dir: Path, starts: tuple[int, ...], sizes: list[int]
) -> None:
    learner = initial_learner(model_dir, quick(max_tokens_per_microbatch=500))
    rows = [row([n, *range(4, 4 + length)], [length]) for n, length in zip(starts, (10, 8, 6, 6, 6), strict=True)]
    batch = batch_of(1, [[sample(r, reward=float(n)) for n, r in enumerate(rows)]])
    split: PassSplit | None = learner.plan_settings.split
    tried = []
    while split is not None:
        minibatches = learner.plan_batch(replace(batch, split=split))
        tried.append((max(m.inputs_BT.size for m in minibatches[0].microbatches), split.gradient_checkpointing))
        split = smaller_split(split, minibatches)
    assert [size for size, _ in tried] == sizes
    assert [is_checkpointing for _, is_checkpointing in tried] == [False, *[True] * (len(sizes) - 1)]


@pytest.mark.parametrize("checkpointing", [1, 2])
def test_after_some_layers_all_are_recomputed_even_if_passes_cannot_be_smaller(
    model_dir: Path, checkpointing: int
) -> None:
    learner = initial_learner(model_dir, quick(max_tokens_per_microbatch=4, gradient_checkpointing=checkpointing))
    minibatches = learner.plan_batch(batch_of(1, [[sample(row([1, *range(4, 14)], [10]))]]))
    split = learner.plan_settings.split
    assert split.checkpointing == checkpointing
    assert str(split) == f"passes of 4 tokens and checkpointing of {checkpointing} layers"
    smaller = smaller_split(split, minibatches)
    assert smaller is not None
    assert smaller != split, "the loop plans the step again"
    assert smaller.checkpoints_all
    assert learner.plan_settings.with_split(smaller).config.gradient_checkpointing is True
    assert smaller_split(smaller, minibatches) is None


async def test_a_step_that_fits_in_no_way_stops_the_run_with_sizes_and_settings(tmp_path: Path) -> None:
    async with open_trainer_ledger() as ledger:
        await ledger.create(max_steps=1)
        with (
            small_device(2),
            pytest.raises(
                RunError,
                match=r"step 1 does not fit into the memory of the trainer \(cpu\) with passes of \d+ tokens and checkpointing\."
                r" Its longest sequence has \d+ tokens.*trainer.lora.*trainer.max_logits_mb.*Tried to allocate",
            ),
        ):
            await TinyLoop(ledger.source(), FakeReplicas(), tmp_path, quick()).run()
        assert await ledger.acknowledged() == {}
        outcome = await TinyLoop(ledger.source(), FakeReplicas(), tmp_path, quick()).run()
        assert outcome.end is LoopEnd.ENDED, "the run resumes where there is more memory"


def test_an_optimizer_that_does_not_fit_is_named_and_leaves_no_state(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = initial_learner(model_dir, quick())
    allocate, allocated = torch.zeros_like, 0

    def zeros_like(*args: Any, **options: Any) -> torch.Tensor:
        nonlocal allocated
        allocated += 1
        if allocated > 5:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 64.00 MiB")
        return allocate(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "zeros_like", zeros_like)
        with pytest.raises(
            StepMemoryError, match=r"the state of the optimizer \(0\.00 GB\) .*trainer\.lora"
        ) as failure:
            learner.run(recorded_batch(1))
    assert failure.value.smaller is None, "smaller passes do not help"
    assert learner.optimizer.state_dict()["state"] == {}
    assert learner.run(recorded_batch(1)).optimizer_steps == 1


async def test_a_failure_after_the_first_optimizer_step_of_a_step_restarts_the_trainer_with_smaller_passes(
    tmp_path: Path,
) -> None:
    settings = {"ppo_n_minibatches": 2, "max_tokens_per_microbatch": 200, "old_logprobs": "engine"}
    async with open_trainer_ledger() as ledger:
        await ledger.create(max_steps=2)
        # The snapshot of the second minibatch and the first minibatch fit; the second does not.
        with small_device(20, fits_first=2), pytest.raises(ChildProcessError, match="The trainer is restarted"):
            await TinyLoop(ledger.source(), FakeReplicas(), tmp_path, quick(**settings)).run()
        assert await ledger.acknowledged() == {}
        outcome = await TinyLoop(ledger.source(), FakeReplicas(), tmp_path, quick(**settings)).run()
        splits = await splits_of(ledger)
        assert splits[1] is not None
        assert splits[1].gradient_checkpointing
        assert await ledger.acknowledged() == await replayed(ledger, tmp_path, 2, **settings)
    assert outcome.end is LoopEnd.ENDED


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110  # recorded calls have no event to wait for
            await asyncio.sleep(0.005)


async def test_the_split_may_change_on_resume_and_recorded_steps_keep_theirs(tmp_path: Path) -> None:
    async with open_trainer_ledger() as ledger:
        await ledger.create(max_steps=4, submitted=3)
        loop = TinyLoop(ledger.source(), FakeReplicas(), tmp_path, quick(max_tokens_per_microbatch=200))
        running = asyncio.create_task(loop.run())
        await until(lambda: {"publish 3", "checkpoint 2"} <= set(ledger.calls))
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        await ledger.submit(4)
        changed = quick(max_tokens_per_microbatch=30, gradient_checkpointing=True)
        outcome = await TinyLoop(ledger.source(), FakeReplicas(), tmp_path, changed).run()
        steps = await ledger.ledger.steps(RUN)
        smaller = PassSplit(max_tokens=30, gradient_checkpointing=True)
        assert [(s.step, s.receipt, s.split) for s in steps if s.epoch == 2] == [
            (3, AckReceipt.REPEATED, WHOLE),
            (4, AckReceipt.ACKNOWLEDGED, smaller),
        ]
        assert outcome.step == 4
        # A replay needs no more than the recorded splits, whatever the settings of the end are.
        digests = await ledger.acknowledged()
        assert digests == await replayed(ledger, tmp_path, 4, max_tokens_per_microbatch=30)
    periods = SettingsHistory.read(tmp_path / "trainer_state.json").periods
    assert [period.changes_bits for period in periods] == [[], ["max_tokens_per_microbatch", "gradient_checkpointing"]]


async def test_a_replay_of_recorded_splits_does_not_run_out_of_memory_first(tmp_path: Path) -> None:
    async with open_trainer_ledger() as ledger:
        await ledger.create(max_steps=2)
        with small_device(40):
            await TinyLoop(ledger.source(), FakeReplicas(), tmp_path, quick(max_tokens_per_microbatch=200)).run()
        with small_device(40) as sizes:
            digests = await replayed(ledger, tmp_path, 2, max_tokens_per_microbatch=200)
        assert digests == await ledger.acknowledged()
        assert max(sizes) <= 40


def test_smaller_passes_are_kept_for_some_steps_and_forgotten_with_other_settings(tmp_path: Path) -> None:
    path, smaller = tmp_path / "trainer_state.json", PassSplit(max_tokens=100, gradient_checkpointing=True)
    splits = PassSplits(path, WHOLE)
    splits.add(StepMemoryError("too long", step=5, failed=WHOLE, smaller=smaller, can_retry=True))
    for known in (splits, PassSplits(path, WHOLE)):
        found = [known.of(step) for step in (4, 5, 6, 4 + SMALLER_STEPS, 5 + SMALLER_STEPS)]
        assert found == [WHOLE, smaller, smaller, smaller, WHOLE]
        assert known.of(6, recorded=WHOLE) == WHOLE, "an acknowledged step is trained as it was"
        assert known.of(5, recorded=WHOLE) == smaller, "unless that did not fit"
    settings = {"max_tokens_per_microbatch": 200, "lr": 1}
    history = SettingsHistory.read(path).resumed(settings, acknowledged_step=5)
    assert history.out_of_memory
    assert history.resumed({**settings, "lr": 2}, acknowledged_step=6).out_of_memory
    assert not history.resumed({**settings, "max_tokens_per_microbatch": 50}, acknowledged_step=6).out_of_memory


def test_a_warm_start_continues_with_smaller_passes(tmp_path: Path) -> None:
    demonstrations = [row([n, *range(4, 14)], [9, 10]) for n in range(4, 10)]

    def tune(name: str, max_tokens: int) -> SftOutcome:
        (tmp_path / name).mkdir()
        return SftLoop(
            config=SftConfig(data="unused", examples_per_step=6, epochs=3),
            trainer=quick(max_tokens_per_microbatch=max_tokens),
            model_dir=tiny_model_dir(tmp_path / "model"),
            directory=tmp_path / name,
            demonstrations=demonstrations,
            validation=(),
            metrics=MetricRecorder("sft", SFT_METRICS, None),
            log=EventLog("sft"),
        ).run()

    with small_device(30):
        outcome = tune("small", 200)
    assert (outcome.is_finished, outcome.steps) == (True, 3)
    assert outcome.checkpoint.weights_digest == tune("large", 30).checkpoint.weights_digest
    assert len(SettingsHistory.read(tmp_path / "small" / "trainer_state.json").out_of_memory) == 1


def test_tokens_are_not_recorded_if_there_is_no_memory_for_it(model_dir: Path) -> None:
    learner = initial_learner(model_dir, quick())
    with small_device(2):
        assert learner.token_values(recorded_batch(1)) == {}
    assert learner.token_values(recorded_batch(1))


def test_a_trial_pass_has_the_size_of_the_planned_ones_and_changes_nothing(model_dir: Path) -> None:
    config = quick(max_tokens_per_microbatch=40)
    learner, other = initial_learner(model_dir, config), initial_learner(model_dir, config)
    longest = learner.model.config.max_position_embeddings
    with small_device(2000) as sizes:
        for tokens in (40, longest, 2 * longest):
            learner.probe(PassSplit(max_tokens=tokens, gradient_checkpointing=True))
    few = min(64, longest)
    assert sizes == [40, 40, few, longest, few, 2 * longest], "two passes each, the first for gradients"
    assert all(parameter.grad is None for parameter in learner.model.parameters())
    for trained in (learner, other):
        trained.run(recorded_batch(1))
    digest, state = weights_and_state(learner)
    expected, expected_state = weights_and_state(other)
    assert digest == expected
    assert all(torch.equal(*pair) for pair in zip(state, expected_state, strict=True))


@pytest.mark.parametrize("checkpointing", [False, 1, True])
def test_smaller_trial_passes_end_with_checkpointing_of_all_layers(checkpointing: bool | int) -> None:
    split: PassSplit | None = PassSplit.of(16_384, checkpointing)
    tried: list[PassSplit] = []
    while split is not None:
        tried.append(split)
        split = smaller_probe(split)
    plain = [one.max_tokens for one in tried if not one.checkpoints_all]
    checkpointed = [one.max_tokens for one in tried if one.checkpoints_all]
    assert plain == ([] if checkpointing is True else [16_384, 8192, 4096, 2048])
    assert checkpointed == ([16_384, 8192, 4096] if checkpointing is True else []) + [2048, 1024, 512, 256]


async def test_the_pass_size_is_tried_before_the_first_step_and_a_resumed_run_keeps_what_fits(tmp_path: Path) -> None:
    found: list[PassSplit] = []
    settings: dict[str, Any] = {"max_tokens_per_microbatch": 1200, "checkpoint_every": 100}
    async with open_trainer_ledger() as ledger:
        await ledger.create(max_steps=3, submitted=2)
        with small_device(300):
            loop = TinyLoop(
                ledger.source(), FakeReplicas(), tmp_path, quick(**settings), probes=True, on_split=found.append
            )
            running = asyncio.create_task(loop.run())
            await until(lambda: "publish 2" in ledger.calls)
            running.cancel()  # before the first checkpoint
            with pytest.raises(asyncio.CancelledError):
                await running
        fits = PassSplit(max_tokens=300, gradient_checkpointing=True)
        assert found == [PassSplit(max_tokens=1200, gradient_checkpointing=True), replace(fits, max_tokens=600), fits]
        await ledger.submit(3)
        # As a process of the run reads them from the recorded configuration.
        resumed = quick(**{**settings, **split_settings(fits)})
        with small_device(300) as sizes:
            outcome = await TinyLoop(ledger.source(), FakeReplicas(), tmp_path, resumed, probes=True).run()
        assert set((await splits_of(ledger)).values()) == {fits}
        assert (outcome.end, outcome.step) == (LoopEnd.ENDED, 3)
        assert max(sizes) < 300, "its first step is a recorded one: nothing is tried"
        assert await ledger.acknowledged() == await replayed(ledger, tmp_path, 3, **settings)
    history = SettingsHistory.read(tmp_path / "trainer_state.json")
    assert len(history.periods) == 1, "the resumed run has the same settings"
    assert history.periods[0].settings["max_tokens_per_microbatch"] == 300
    assert not history.out_of_memory
    (event,) = [e for e in read_json_lines(tmp_path / "logs" / "trainer.jsonl") if e["event"] == "trainer.probed"]
    assert (event["planned"], event["found"]) == ("passes of 1200 tokens", str(fits))


@pytest.mark.parametrize("is_packed", [True, False])
def test_sequences_of_a_trial_pass_fit_into_the_context_of_the_model(is_packed: bool) -> None:
    for tokens in (1, 63, 64, 65, 1000):
        found = probe_pass(tokens, vocabulary_size=5, context=64, is_packed=is_packed)
        assert tokens - found.num_rows < found.inputs_BT.size <= tokens
        assert len(found.targets_N) == found.inputs_BT.size
        assert max(np.bincount(found.row_of_N)) <= 64


async def test_a_model_of_which_no_pass_fits_ends_the_run_before_its_first_batch(tmp_path: Path) -> None:
    async with open_trainer_ledger() as ledger:
        await ledger.create(max_steps=1)
        with (
            small_device(100),
            pytest.raises(
                RunError, match=r"a trial pass does not fit into the memory of the trainer \(cpu\) with passes of"
            ),
        ):
            await TinyLoop(ledger.source(), FakeReplicas(), tmp_path, quick(), probes=True).run()
        assert await ledger.acknowledged() == {}
