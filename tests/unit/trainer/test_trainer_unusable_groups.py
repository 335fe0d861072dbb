"""Groups that cannot be trained do not stop a run: the step is trained without them, the same way in every replay."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollbook.contracts.batch import EncodedBatch, TrainingBatch
from rollbook.contracts.errors import RunError
from rollbook.contracts.group import GroupId, PromptGroup
from rollbook.contracts.group_checks import MIN_TEMPERATURE, TrainingLimits, UnusableGroupError, inspect_frame
from rollbook.contracts.group_codec import EncodedGroup, encode_group, payload_digest
from rollbook.contracts.policy import SamplingParams
from rollbook.contracts.trajectory import MAX_REWARD, MIN_LOGPROB, RolloutSample, TokenRow
from rollbook.ledger.rules.groups import Submission
from rollbook.ledger.service import Ledger
from rollbook.ledger.tools.audit import audit_run
from rollbook.telemetry.events import read_json_lines
from rollbook.telemetry.metrics import read_metrics
from rollbook.trainer.checkpoints.checkpoints import initial_learner
from rollbook.trainer.loop import LoopEnd
from rollbook.trainer.replay import replay
from tests.parts.ledger.frames import changed_frame, changed_sample, odd_samples, past_the_door
from tests.parts.ledger.groups import RUN, group_of, outcome_of, submission_of
from tests.parts.ledger.groups import settings as run_settings
from tests.parts.ledger.service import read_batch
from tests.parts.trainer.batches import VOCABULARY_SIZE, batch_of, quick, recorded_batch, tiny_model_dir
from tests.parts.trainer.ledger import FakeReplicas, TinyLoop, open_trainer_ledger, unversioned

LIMITS = TrainingLimits(vocabulary_size=VOCABULARY_SIZE, max_tokens=64)


async def create(ledger: Ledger, *, per_step: int, max_steps: int) -> None:
    await ledger.create_run(RUN, replace(run_settings(per_step=per_step, max_steps=max_steps), limits=LIMITS))


def groups_of(step: int, count: int = 3) -> list[PromptGroup]:
    return [unversioned(group) for group in recorded_batch(step, groups=count).groups]


async def recorded(ledger: Ledger, steps: int) -> list[TrainingBatch]:
    """The batches as a replay reads them."""
    epoch = (await ledger.status(RUN)).epoch
    found = [await read_batch(ledger, step, epoch=epoch, wait_s=0) for step in range(1, steps + 1)]
    return [batch.decode() for batch in found if isinstance(batch, EncodedBatch)]


async def test_the_step_has_the_weights_of_a_batch_without_the_unusable_group(tmp_path: Path) -> None:
    good, poisoned = groups_of(1, 2), groups_of(2, 1)[0]
    async with open_trainer_ledger() as run:
        await create(run.ledger, per_step=3, max_steps=1)
        await run.ledger.submit(RUN, submission_of(good[0]))
        await run.ledger.submit(RUN, past_the_door(poisoned, changed_sample(poisoned, reward=float("inf"))))
        await run.ledger.submit(RUN, submission_of(good[1]))
        outcome = await TinyLoop(run.source(), FakeReplicas(), tmp_path, quick()).run()
        unusable = [group for group in await run.ledger.groups(RUN) if group.unusable]
        report = await run.ledger.read(lambda tx: audit_run(tx, RUN))
    assert outcome.end is LoopEnd.ENDED
    assert [group.group_id for group in unusable] == [poisoned.id]
    assert report.violations == ()
    only_good = replace(recorded_batch(1, groups=2), groups=tuple(good))
    expected = await replay([only_good], model_dir=tmp_path / "model", config=quick())
    assert outcome.digest == expected.final_digest
    events = list(read_json_lines(tmp_path / "logs" / "trainer.jsonl"))
    [reported] = [event for event in events if event["event"] == "trainer.unusable_groups"]
    assert list(reported["groups"]) == [poisoned.id]
    assert read_metrics(tmp_path / "metrics.jsonl")[-1]["async/unusable_groups"] == 1


@pytest.mark.parametrize("minibatches", [1, 2])
async def test_a_batch_of_unusable_groups_only_is_a_step_without_an_update(tmp_path: Path, minibatches: int) -> None:
    config = quick(ppo_n_minibatches=minibatches)
    async with open_trainer_ledger() as run:
        await create(run.ledger, per_step=2, max_steps=3)
        for step in (1, 2, 3):
            for group in groups_of(step, 2):
                bad = past_the_door(group, b"\x80" if step == 2 else encode_group(group).payload)
                await run.ledger.submit(RUN, bad)
        outcome = await TinyLoop(run.source(), FakeReplicas(), tmp_path, config).run()
        digests = await run.acknowledged()
        publications = await run.publications()
        batches = await recorded(run.ledger, 3)
        report = await run.ledger.read(lambda tx: audit_run(tx, RUN))
    assert (outcome.end, outcome.step) == (LoopEnd.ENDED, 3)
    assert digests[2] == digests[1] != digests[3]
    assert [publication.step for publication in publications] == [0, 1, 2, 3]
    assert report.violations == ()
    again = await replay(batches, model_dir=tmp_path / "model", config=config)
    assert {step: again.digests[step] for step in (1, 2, 3)} == digests


async def test_a_trainer_that_is_replaced_trains_the_same_groups_again(tmp_path: Path) -> None:
    config = quick(checkpoint_every=100)
    async with open_trainer_ledger() as run:
        await create(run.ledger, per_step=2, max_steps=2)
        for step in (1, 2):
            for number, group in enumerate(groups_of(step, 2)):
                payload = changed_sample(group, sequences=[]) if number == 0 else encode_group(group).payload
                await run.ledger.submit(RUN, past_the_door(group, payload))
        first = await TinyLoop(run.source(), FakeReplicas(), tmp_path / "first", config).run()
        # A trainer without checkpoints: it trains everything again.
        second = await TinyLoop(run.source(), FakeReplicas(), tmp_path / "second", config).run()
        report = await run.ledger.read(lambda tx: audit_run(tx, RUN))
    assert first.digest == second.digest
    assert "acknowledge 2 again" in run.calls
    assert report.violations == ()


async def test_a_model_with_a_smaller_vocabulary_than_the_run_is_refused_at_the_start(tmp_path: Path) -> None:
    async with open_trainer_ledger() as run:
        limits = TrainingLimits(vocabulary_size=VOCABULARY_SIZE + 1)
        await run.ledger.create_run(RUN, replace(run_settings(), limits=limits))
        with pytest.raises(RunError, match="vocabulary of 16 tokens, but the ledger accepts token ids below 17"):
            await TinyLoop(run.source(), FakeReplicas(), tmp_path, quick()).run()


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir(tmp_path_factory.mktemp("models") / "model")


@given(frames=st.lists(st.tuples(odd_samples(), st.booleans()), min_size=4, max_size=8), seed=st.integers(0, 3))
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
async def test_whatever_is_stored_is_trained_or_recorded_as_unusable_and_the_run_goes_on(
    tmp_path_factory: pytest.TempPathFactory, frames: list[tuple[list[dict[str, object]], bool]], seed: int
) -> None:
    directory = tmp_path_factory.mktemp("run")
    config = quick(old_logprobs="engine", checkpoint_every=100, advantage="dr_grpo")
    async with open_trainer_ledger() as run:
        ledger = run.ledger
        await create(ledger, per_step=2, max_steps=100)
        refused = set()
        for number, (samples, is_poisoned) in enumerate(frames):
            group = group_of(f"t{number}", (-1,))
            payload = changed_frame(group, samples=samples)
            if is_poisoned:
                await ledger.submit(RUN, past_the_door(group, payload))
                continue
            try:
                (result,) = await ledger.submit(RUN, _honest(group, payload))
            except UnusableGroupError as error:
                result = error
            if isinstance(result, UnusableGroupError):
                refused.add(group.id)
        await ledger.exhausted(RUN)
        outcome = await TinyLoop(run.source(), FakeReplicas(), directory, config).run()
        report = await ledger.read(lambda tx: audit_run(tx, RUN))
        stored = await ledger.groups(RUN)
        batches = await recorded(ledger, outcome.step)
        digests = await run.acknowledged()
    assert outcome.end is LoopEnd.ENDED
    assert {group.group_id for group in stored}.isdisjoint(refused)
    assert all(group.state in ("trained", "durable") for group in stored)
    # Only groups that were written past the checks are unusable. Their rows state what the good group has, so the audit may report
    # those statements, and nothing else.
    poisoned = {GroupId(f"t{number}@0") for number, (_, is_poisoned) in enumerate(frames) if is_poisoned}
    assert {group.group_id for group in stored if group.unusable} <= poisoned
    allowed = tuple(f"group {id_}: {what}" for id_ in poisoned for what in ("by its payload", "samples and baseline"))
    assert [violation for violation in report.violations if not violation.startswith(allowed)] == []
    again = await replay(batches, model_dir=directory / "model", config=config)
    assert {step: again.digests[step] for step in digests} == digests


EXTREME_LOSSES: dict[str, dict[str, object]] = {
    "grpo": {"kl_coef": 1.0},
    "gspo": {"kl_coef": 1.0},
    "dapo": {"kl_coef": 1.0, "correction": "tis"},
    "cispo": {"kl_coef": 1.0},
    "importance_sampling": {"old_logprobs": "engine"},
    "reinforce": {"kl_coef": 0.1},
    "decoupled": {},
    "dro": {"kl_coef": 0.1},
}


def _extreme_sample(seed: int, *, logprob: float, temperature: float, reward: float) -> RolloutSample:
    """Every value is at a limit of what the ledger accepts."""
    rng, length = np.random.default_rng(seed), 12
    is_trained = np.arange(length) > 0
    token_row = TokenRow.of(
        token_ids=rng.integers(0, VOCABULARY_SIZE, length),
        logprobs=np.where(is_trained, logprob, 0.0),
        loss_mask=is_trained,
        versions=np.where(is_trained, 0, -1),
        weights=np.full(length, MAX_REWARD),
        advantages=np.where(rng.random(length) < 0.5, MAX_REWARD, -MAX_REWARD),
    )
    return RolloutSample(sequences=(token_row,), sampling=SamplingParams(temperature=temperature), reward=reward)


@pytest.mark.parametrize("loss", EXTREME_LOSSES)
@pytest.mark.parametrize(("logprob", "temperature"), [(MIN_LOGPROB, 1.0), (MIN_LOGPROB, MIN_TEMPERATURE)])
def test_accepted_values_never_make_a_gradient_that_is_not_finite(
    model_dir: Path, loss: str, logprob: float, temperature: float
) -> None:
    """Otherwise three such groups would stop the run, again at every resume."""
    learner = initial_learner(model_dir, quick(loss=loss, **EXTREME_LOSSES[loss]))
    samples = [
        _extreme_sample(seed, logprob=logprob, temperature=temperature, reward=reward)
        for seed, reward in enumerate((MAX_REWARD, -MAX_REWARD))
    ]
    reports = [learner.run(batch_of(step, [samples])) for step in (1, 2, 3, 4)]
    assert [report.skipped_steps for report in reports] == [0, 0, 0, 0]
    assert all(bool(parameter.isfinite().all()) for parameter in learner.model.weights().values())


def _honest(group: PromptGroup, payload: bytes) -> Submission:
    """What a producer that computes its statements from the payload sends."""
    facts = inspect_frame(payload, group.id)
    outcome = replace(
        outcome_of(group),
        num_samples=facts.num_samples,
        num_scorable=facts.num_scorable,
        reward_mean=facts.reward_mean,
    )
    return Submission.of(
        EncodedGroup(
            id=group.id,
            outcome=outcome,
            payload=payload,
            digest=payload_digest(payload),
        )
    )
