"""One training step: its gradient, its metrics, and the batches it rejects."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from rollbook.contracts.batch import TrainingBatch
from rollbook.contracts.errors import RunError
from rollbook.contracts.trajectory import RolloutSample
from rollbook.trainer.advantages.registry import credit
from rollbook.trainer.checkpoints.checkpoints import initial_learner
from rollbook.trainer.data.minibatches import plan, with_lags
from rollbook.trainer.data.rows import flatten
from rollbook.trainer.losses.inputs import LossInputs, LossSettings, LossTerms
from rollbook.trainer.losses.pass_loss import MIN_SAMPLED_LOGPROB
from rollbook.trainer.losses.registry import LOSSES
from rollbook.trainer.losses.statistics import TokenStatistics
from rollbook.trainer.metrics import mixed_caches
from rollbook.trainer.model.policy_model import PolicyModel
from rollbook.trainer.model_config import ModelBuildConfig
from rollbook.trainer.step import TrainStep
from tests.parts.trainer.batches import BUILD, batch_of, one_pass, quick, recorded_batch, row, sample, tiny_model_dir


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    torch.set_num_threads(1)
    return tiny_model_dir(tmp_path / "model")


def plain_gradient(model: PolicyModel, batch: TrainingBatch) -> dict[str, torch.Tensor]:
    """The reference: the policy gradient of the token mean, one sequence at a time, without prefix sharing and padding."""
    module = model.module
    module.zero_grad(set_to_none=True)
    advantages = iter(credit(batch, quick()).by_sample)
    samples = [(s, next(advantages)) for group in batch.groups for s in group.samples]
    total = sum(s.num_trained for s, _ in samples if s.is_scorable)
    for s, advantage in samples:
        for r in s.sequences if s.is_scorable else ():
            ids = torch.from_numpy(r.token_ids.astype(np.int64))
            logits = module(input_ids=ids[None]).logits[0] / s.sampling.temperature
            at = torch.from_numpy(np.flatnonzero(r.loss_mask))
            chosen = torch.log_softmax(logits, -1)[at - 1, ids[at]]
            torch.autograd.backward(-float(advantage) * chosen.sum() / total)
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


def test_the_first_update_follows_the_plain_policy_gradient(model_dir: Path) -> None:
    """After the first step, Adam's running mean is (1 - beta1) * gradient."""
    batch = recorded_batch(1)
    expected = plain_gradient(PolicyModel.load(model_dir), batch)
    config = quick(max_grad_norm=1e9, max_tokens_per_microbatch=40)
    learner = initial_learner(model_dir, config)
    learner.run(batch)
    means = {
        name: learner.optimizer.state[parameter]["exp_avg"] / (1 - config.betas[0])
        for name, parameter in learner.model.module.named_parameters()
    }
    assert means.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(means[name], gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("minibatches", [1, 3])
def test_the_same_batch_on_the_same_state_gives_the_same_bits(model_dir: Path, minibatches: int) -> None:
    config = quick(ppo_n_minibatches=minibatches, max_tokens_per_microbatch=50)
    digests = []
    for _ in range(2):
        learner = initial_learner(model_dir, config)
        for step in (1, 2):
            learner.run(recorded_batch(step))
        digests.append(learner.model.digest())
    assert digests[0] == digests[1] != initial_learner(model_dir, config).model.digest()


def test_with_one_minibatch_the_ratio_is_one(model_dir: Path) -> None:
    report = initial_learner(model_dir, quick(max_tokens_per_microbatch=30)).run(recorded_batch(1))
    assert (report.metrics["train/ratio_mean"], report.metrics["train/ppo_kl"]) == (1.0, 0.0)
    assert report.metrics["train/ppo_clip_frac"] == 0.0
    assert report.optimizer_steps == 1


def test_with_several_minibatches_the_policy_drifts_from_the_start_of_the_step(model_dir: Path) -> None:
    report = initial_learner(model_dir, quick(ppo_n_minibatches=4, lr=0.05, clip_low=0.01, clip_high=0.01)).run(
        recorded_batch(1)
    )
    assert report.optimizer_steps == 4
    assert (report.metrics["train/ppo_kl"] or 0) > 1e-4
    assert (report.metrics["train/ppo_clip_frac"] or 0) > 0


def test_drift_and_mismatch_are_measured_whatever_the_ratio_is_taken_to(model_dir: Path) -> None:
    """`reinforce` reads no ratio, so both train the same. Two minibatches of one pass: every token is measured."""
    measured = [
        initial_learner(model_dir, quick(loss="reinforce", ppo_n_minibatches=2, lr=0.05, old_logprobs=old))
        .run(recorded_batch(1))
        .metrics
        for old in ("engine", "snapshot")
    ]
    assert (measured[0]["train/ppo_kl"] or 0) > 1e-4
    assert measured[0] == measured[1]


def test_mismatch_of_later_minibatches_is_that_of_the_start_of_the_step(model_dir: Path) -> None:
    settings = {"old_logprobs": "engine", "ppo_n_minibatches": 3, "max_tokens_per_microbatch": 30}
    still, moving = (
        initial_learner(model_dir, quick(**settings, lr=lr)).run(recorded_batch(1)).metrics for lr in (1e-12, 0.1)
    )
    assert (still["train/ppo_kl"] or 0) < 1e-9 < (moving["train/ppo_kl"] or 0)
    for name in ("train/mean_kl", "train/numerics_kl", "train/ess", "train/mismatch_weight_mean"):
        assert still[name] == pytest.approx(moving[name], rel=1e-5), name


def test_divergence_from_the_sampler_is_measured_by_lag(model_dir: Path) -> None:
    learner = initial_learner(model_dir, quick())
    exact = float(learner.model.token_logprobs(one_pass([[1, 5]], [1], [6]))[0].detach())

    def group(*publications: int) -> list[RolloutSample]:
        """Tokens of a higher id are less likely under the sampler."""
        rows = [row([1, 5, 6], [2], logprob=exact - 0.1 * (p - 10), version=p) for p in publications]
        return [sample(tokens, reward=float(n)) for n, tokens in enumerate(rows)]

    learner.step = 8
    batch = batch_of(9, [group(12, 14), group(13, 13), group(14, 14), group(10, 11)])
    # Ids 12, 13, 14 and 10 are versions 5, 7, 8 and 2. The version of id 11 is not known.
    entries = [
        replace(entry, oldest_version=version)
        for entry, version in zip(batch.manifest.entries, (5, 7, 8, 2), strict=True)
    ]
    found = learner.run(replace(batch, manifest=replace(batch.manifest, entries=tuple(entries)))).metrics

    def expected(*publications: int) -> float:
        return sum(math.expm1(0.1 * (p - 10)) - 0.1 * (p - 10) for p in publications) / len(publications)

    assert found["train/numerics_kl"] == pytest.approx(expected(14), rel=1e-3)
    assert found["train/lag_kl_1"] == pytest.approx(expected(13), rel=1e-3)
    assert found["train/lag_kl_2"] is None
    assert found["train/lag_kl_3"] == pytest.approx(expected(12), rel=1e-3)
    assert found["train/lag_kl_4"] == pytest.approx(0, abs=1e-9), "lag 6"
    assert found["train/mean_kl"] == pytest.approx(expected(12, 14, 13, 13, 14, 14, 10, 11), rel=1e-3)


def test_the_trainers_own_publications_tell_lags_that_the_manifest_does_not() -> None:
    """One group, sampled by publications 12 to 14 in turn: the manifest contains the version of the oldest."""
    tokens = row([1, 5, 6, 7, 8], [1, 2, 3, 4])
    tokens = replace(tokens, versions=np.array([-1, 12, 13, 14, 14], dtype=np.int32))
    batch = batch_of(9, [[sample(tokens, reward=reward) for reward in (0.0, 1.0)]], oldest=3)
    planned = plan(flatten(batch, quick()), quick(), step=9, is_packed=False)

    def lags(published: dict[int, int]) -> list[int]:
        (part,) = with_lags(planned, published, step=9)
        return [value for micro in part.microbatches if micro.lags_N is not None for value in micro.lags_N.tolist()]

    assert lags({}) == [4, -1, -1, -1] * 2, "lag 5 counts as 4 and more"
    assert lags({13: 7, 14: 8}) == [4, 1, 0, 0] * 2


def test_tokens_after_an_update_of_their_request_are_not_compared_with_the_newest_policy() -> None:
    versions = np.array([-1, -1, 7, 7, 8, -1, 8, 8, 9], dtype=np.int32)
    assert mixed_caches(versions).tolist() == [False, False, False, False, True, False, False, False, True]
    statistics = TokenStatistics()
    count, zeros = 4, torch.zeros(4)
    sampled = torch.tensor([-1.0, -2.0, -3.0, -4.0])
    inputs = LossInputs(
        current_N=sampled + 0.5, old_N=sampled, sampled_N=sampled, advantages_N=zeros, row_of_N=zeros.long(), num_rows=1
    )
    statistics.add(
        inputs,
        LossTerms(loss_N=zeros, is_clipped_N=zeros.bool()),
        starting_N=sampled + torch.tensor([0.0, 0.1, 0.1, 0.1]),
        measures_drift=True,
        entropy_N=zeros,
        is_known_N=torch.ones(count, dtype=torch.bool),
        lags_N=torch.tensor([0, 0, 0, 1]),
        is_mixed_N=torch.tensor([False, False, True, True]),
        pass_number=5,
    )
    found = statistics.metrics()
    assert found["train/compared_tokens"] == 2
    number, at, trained, recorded = statistics.largest_difference() or (0, 0, 0.0, 0.0)
    assert (number, at, recorded) == (5, 1, -2.0)
    assert trained == pytest.approx(-1.9)
    assert found["train/inexact_share"] == 0.5
    assert found["train/mixed_cache_share"] == 0.5
    assert found["train/numerics_kl"] == pytest.approx((math.expm1(0.1) - 0.1) / 2, rel=1e-3)
    assert found["train/lag_kl_1"] == pytest.approx(math.expm1(0.1) - 0.1, rel=1e-3)


def test_an_equal_logprob_is_equal_even_if_the_token_is_less_likely_than_the_bound_of_ratios(model_dir: Path) -> None:
    learner = initial_learner(model_dir, quick())
    with torch.no_grad():
        learner.model.module.get_output_embeddings().weight.mul_(2000)  # type: ignore[operator]
        logprobs = learner.model.token_logprobs(one_pass([[1, 5]] * 8, [1, 3, 5, 7, 9, 11, 13, 15], [*range(8)]))[0]
    unlikely = int(logprobs.argmin())
    assert float(logprobs[unlikely]) < MIN_SAMPLED_LOGPROB
    tokens = row([1, 5, unlikely], [2], logprob=float(logprobs[unlikely]), version=3)
    batch = batch_of(1, [[sample(tokens, reward=reward) for reward in (0.0, 1.0)]], oldest=0)
    assert learner.run(batch).metrics["train/numerics_kl"] == 0.0


def test_later_minibatches_are_compared_with_the_start_of_the_step(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[torch.Tensor] = []

    def recording_loss(inputs: LossInputs, settings: LossSettings) -> LossTerms:
        seen.append(inputs.old_N)
        return dapo(inputs, settings)

    dapo = LOSSES["dapo"]
    monkeypatch.setitem(LOSSES, "dapo", recording_loss)
    # With a tiny learning rate every minibatch is computed with the initial weights.
    initial_learner(model_dir, quick(lr=1e-9, ppo_n_minibatches=3)).run(recorded_batch(1))
    start, seen = seen, []
    initial_learner(model_dir, quick(lr=0.1, ppo_n_minibatches=3)).run(recorded_batch(1))
    assert len(start) == len(seen) == 3
    for expected, found in zip(start, seen, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_the_ratio_can_be_taken_against_the_sampling_policy(model_dir: Path) -> None:
    learner = initial_learner(model_dir, quick(old_logprobs="engine"))
    exact = float(learner.model.token_logprobs(one_pass([[1, 5]], [1], [6]))[0].detach())
    lagging = [
        sample(row([1, 5, 6], [2], logprob=exact - math.log(ratio)), reward=reward)
        for ratio, reward in ((2, 1.0), (1, 0.0))
    ]
    report = learner.run(batch_of(1, [lagging]))
    assert report.metrics["train/mismatch_weight_mean"] == pytest.approx(1.5, rel=1e-5)
    assert (report.metrics["train/ratio_mean"], report.metrics["train/ppo_kl"]) == (1.0, 0.0), "nothing drifted"
    assert report.metrics["train/ppo_clip_frac"] == 0.5, "its ratio of 2 is clipped, because its advantage is positive"


def test_logprobs_use_the_temperature_of_each_sample(model_dir: Path) -> None:
    model = PolicyModel.load(model_dir)
    ids = torch.tensor([[1, 5, 6, 7]])
    logits = model.module(input_ids=ids).logits[0, [1, 2]].detach().double()
    found, entropy = model.token_logprobs(one_pass(ids.tolist(), [1, 2], [6, 7], [0.5, 2.0]))
    for n, (target, temperature) in enumerate([(6, 0.5), (7, 2.0)]):
        probabilities = torch.softmax(logits[n] / temperature, -1)
        assert float(found[n].detach()) == pytest.approx(math.log(probabilities[target]), abs=1e-5)
        assert float(entropy[n]) == pytest.approx(float(-(probabilities * probabilities.log()).sum()), abs=1e-5)


def test_a_model_with_a_custom_head_gives_the_same_logprobs(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = one_pass([[1, 5, 6, 7], [1, 9, 0, 0]], [2, 1, 5], [7, 6, 4])
    logprobs, entropy = PolicyModel.load(model_dir).token_logprobs(rows)
    monkeypatch.setattr("rollbook.trainer.model.policy_model.logits_of", lambda module: None)
    full_logprobs, full_entropy = PolicyModel.load(model_dir).token_logprobs(rows)
    torch.testing.assert_close(logprobs, full_logprobs, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(entropy, full_entropy, rtol=1e-5, atol=1e-6)


def test_agreement_with_the_sampler_is_measured(model_dir: Path) -> None:
    learner = initial_learner(model_dir, quick())
    exact = float(learner.model.token_logprobs(one_pass([[1, 5]], [1], [6]))[0].detach())
    agreeing = [sample(row([1, 5, 6], [2], logprob=exact), reward=r) for r in (0.0, 1.0)]
    report = learner.run(batch_of(1, [agreeing]))
    assert report.metrics["train/mean_kl"] == pytest.approx(0, abs=1e-9)
    assert report.metrics["train/ess"] == pytest.approx(1, abs=1e-6)
    learner = initial_learner(model_dir, quick())
    differing = [agreeing[0], sample(row([1, 5, 6], [2], logprob=exact - math.log(3)), reward=1.0)]
    report = learner.run(batch_of(1, [differing]))
    # The weights are 1 and 3: k3 = (0 + 3 - ln 3 - 1) / 2, ESS = (1 + 3)^2 / (2 * (1 + 9)).
    assert report.metrics["train/mean_kl"] == pytest.approx((2 - math.log(3)) / 2, rel=1e-4)
    assert report.metrics["train/ess"] == pytest.approx(0.8, rel=1e-4)


def test_missing_sampling_logprobs_are_recomputed(model_dir: Path) -> None:
    unknown = batch_of(1, [[sample(row([1, 5, 6], [2], logprob=math.nan), reward=r) for r in (0.0, 1.0)]])
    report = initial_learner(model_dir, quick(missing_logprobs="recompute")).run(unknown)
    assert report.metrics["train/unknown_logprob_tokens"] == 2
    assert report.metrics["train/mean_kl"] is None
    assert report.optimizer_steps == 1


def test_unknown_sampling_logprobs_are_those_of_the_start_of_the_step_in_every_minibatch(model_dir: Path) -> None:
    samples = [sample(row([1, 5 + n, 6, 7], [2, 3], logprob=math.nan), reward=float(n % 2)) for n in range(4)]
    digests = set()
    for old_logprobs in ("engine", "snapshot"):
        settings = {"old_logprobs": old_logprobs, "missing_logprobs": "recompute", "ppo_n_minibatches": 2}
        learner = initial_learner(model_dir, quick(**settings))
        learner.run(batch_of(1, [samples]))
        digests.add(learner.model.digest())
    assert len(digests) == 1


def test_a_very_low_sampling_logprob_gives_a_finite_gradient(model_dir: Path) -> None:
    samples = [sample(row([1, 5, 6], [2], logprob=-9999.0), reward=reward) for reward in (0.0, 1.0)]
    learner = initial_learner(model_dir, quick(old_logprobs="engine"))
    assert learner.run(batch_of(1, [samples])).optimizer_steps == 1


def test_a_gradient_that_is_not_finite_is_skipped_and_reported(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(inputs: LossInputs, settings: LossSettings) -> LossTerms:
        return LossTerms(
            loss_N=inputs.current_N * math.inf, is_clipped_N=torch.zeros(len(inputs.old_N), dtype=torch.bool)
        )

    learner = initial_learner(model_dir, quick())
    before = learner.model.digest()
    with monkeypatch.context() as patched:
        patched.setitem(LOSSES, "dapo", broken)
        report = TrainStep(learner.model, quick()).run(recorded_batch(1))
    assert (report.optimizer_steps, report.skipped_steps) == (0, 1)
    assert learner.model.digest() == before


def test_a_batch_with_nothing_scorable_changes_nothing(model_dir: Path) -> None:
    learner = initial_learner(model_dir, quick())
    before = learner.model.digest()
    report = learner.run(batch_of(1, [[sample(reward=None), sample(reward=None)]]))
    assert (report.optimizer_steps, report.num_tokens, learner.step) == (0, 0, 1)
    assert learner.model.digest() == before


def test_invalid_batches_are_reported_before_training(model_dir: Path) -> None:
    learner = initial_learner(model_dir, quick())
    with pytest.raises(RunError, match="received batch 3; batches are trained in order"):
        learner.run(recorded_batch(3))
    with pytest.raises(RunError, match=r"t0@1 has token id 99, but the vocabulary has 16 tokens"):
        learner.run(batch_of(1, [[sample(row([1, 5, 99], [2]))]]))
    assert learner.step == 0


def test_untied_models_train_their_output_embedding_too(tmp_path: Path) -> None:
    untied = ModelBuildConfig.model_validate({**BUILD.model_dump(), "tie_embeddings": False})
    learner = initial_learner(tiny_model_dir(tmp_path / "untied", build=untied), quick())
    before = learner.model.weights()["lm_head.weight"].clone()
    learner.run(recorded_batch(1))
    assert not torch.equal(before, learner.model.weights()["lm_head.weight"])
    tied = PolicyModel.load(tiny_model_dir(tmp_path / "tied"))
    assert "lm_head.weight" not in tied.weights()


def test_token_values_are_those_of_a_plain_forward_pass_and_change_nothing(model_dir: Path) -> None:
    batch = recorded_batch(1)
    config = quick(max_tokens_per_microbatch=40)
    learner = initial_learner(model_dir, config)
    before = {name: tensor.clone() for name, tensor in learner.snapshot().items()}
    found = learner.token_values(batch)
    advantages = iter(credit(batch, config).by_sample)
    module = PolicyModel.load(model_dir).module
    num_sequences = 0
    for group in batch.groups:
        for number, s in enumerate(group.samples):
            advantage = next(advantages)
            for sequence, r in enumerate(s.sequences if s.is_scorable else ()):
                num_sequences += 1
                arrays = found[group.id, number, sequence]
                ids = torch.from_numpy(r.token_ids.astype(np.int64))
                with torch.no_grad():
                    logprobs = torch.log_softmax(module(input_ids=ids[None]).logits[0] / s.sampling.temperature, -1)
                at = np.flatnonzero(r.loss_mask)
                expected = logprobs[torch.from_numpy(at - 1), ids[torch.from_numpy(at)]].numpy()
                recorded = np.frombuffer(arrays.logprob, "<f4")
                np.testing.assert_allclose(recorded[at], expected, atol=1e-4)
                assert np.isnan(np.delete(recorded, at)).all()
                np.testing.assert_allclose(np.frombuffer(arrays.advantage, "<f4")[at], advantage, atol=1e-5)
                assert (np.frombuffer(arrays.entropy, "<f4")[at] >= 0).all()
    assert len(found) == num_sequences
    after = learner.snapshot()
    assert all(torch.equal(before[name], after[name]) for name in before)
