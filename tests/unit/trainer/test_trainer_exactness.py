"""Where sampler and trainer promise equal bits, logprobs are compared, and the token that differs most is named."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from rollbook.contracts.batch import TrainingBatch
from rollbook.contracts.policy import SamplerExactness, SamplingParams
from rollbook.numerics.machine import ProbedAnswer
from rollbook.trainer.checkpoints.checkpoints import initial_learner
from rollbook.trainer.config import TrainerConfig
from rollbook.trainer.data.minibatches import plan_minibatch, with_lags
from rollbook.trainer.data.passes import Microbatch
from rollbook.trainer.data.rows import flatten
from rollbook.trainer.exactness import (
    EarlierWeights,
    compare_probe,
    pass_to_check,
    row_of_answer,
    unequal_answers,
    why_inexact,
)
from rollbook.trainer.model.policy_model import PolicyModel
from rollbook.trainer.step import TrainStep
from tests.parts.inference.models import build_model
from tests.parts.trainer.batches import batch_of, quick, recorded_batch, row, sample, tiny_model_dir

EXACT = SamplerExactness(inexact_because=None, machine={"GPU": "H200", "torch": "2.11", "driver": "570"})
ROWS = ([1, 5, 6], [1, 5, 7], [1, 8, 9])
Logprobs = Mapping[int, float]
"""By number of the sample."""


def new_learner(model_dir: Path) -> TrainStep:
    """Passes of a CPU have the same bits if they have the same rows: as good as exact here."""
    torch.set_num_threads(1)
    made = initial_learner(model_dir, quick(old_logprobs="engine"))
    made.model.inexact_because = None
    return made


@pytest.fixture
def learner(tmp_path: Path) -> TrainStep:
    return new_learner(tiny_model_dir(tmp_path / "model"))


def batch_with(step: int, *, version: int, logprobs: Logprobs | None = None, top_p: float = 1.0) -> TrainingBatch:
    """One group of three answers. A publication has the id of its version plus 10."""
    found = logprobs or {}
    answers = [
        sample(row(ids, [2], logprob=found.get(n, -2.0), version=version + 10), reward=float(n))
        for n, ids in enumerate(ROWS)
    ]
    sampling = SamplingParams(top_p=top_p)
    return batch_of(step, [[replace(answer, sampling=sampling) for answer in answers]], oldest=version)


def by_sample(learner: TrainStep, micro: Microbatch) -> dict[int, float]:
    """The trainer's logprobs."""
    with torch.no_grad():
        logprobs = learner.model.token_logprobs(micro)[0].tolist()
    return {micro.sources[n].sample: logprob for n, logprob in zip(micro.row_of_N.tolist(), logprobs, strict=True)}


def test_a_token_with_another_bit_is_named(learner: TrainStep) -> None:
    (part,) = learner.plan_batch(batch_with(1, version=0))
    exact = by_sample(learner, part.microbatches[0])
    above = {n: float(np.nextafter(np.float32(value), np.float32(0.0))) for n, value in exact.items()}
    report = learner.run(batch_with(1, version=0, logprobs={**exact, 1: above[1]}))
    assert report.metrics["train/compared_tokens"] == 3
    assert report.metrics["train/inexact_share"] == pytest.approx(1 / 3)
    assert report.unequal is not None
    assert str(report.unequal) == (
        f"token 2 of sample 1 of group {batch_with(1, version=0).groups[0].id}, sampled by publication 10 (lag 0):"
        f" {above[1]!r} in the engine, {exact[1]!r} in the trainer"
    )


def test_equal_logprobs_are_no_problem(learner: TrainStep) -> None:
    (part,) = learner.plan_batch(batch_with(1, version=0))
    report = learner.run(batch_with(1, version=0, logprobs=by_sample(learner, part.microbatches[0])))
    assert report.metrics["train/compared_tokens"] == 3
    assert report.metrics["train/inexact_share"] == 0
    assert report.unequal is None


def test_nothing_is_compared_where_the_sampler_promises_nothing(learner: TrainStep) -> None:
    learner.comparison.is_promised = False
    report = learner.run(batch_with(1, version=0))
    assert report.metrics["train/inexact_share"] is None
    assert report.metrics["train/compared_tokens"] is None
    assert report.unequal is None


def test_logprobs_of_a_part_of_the_vocabulary_are_not_compared(learner: TrainStep) -> None:
    report = learner.run(batch_with(1, version=0, top_p=0.9))
    assert report.metrics["train/compared_tokens"] == 0
    assert report.metrics["train/numerics_kl"] is None
    assert (report.metrics["train/mean_kl"] or 0) > 0


def trained_three_steps(model_dir: Path) -> tuple[TrainStep, dict[int, float]]:
    """And the logprobs of version 2 for a pass over the rows of a later check."""
    learner = new_learner(model_dir)
    learner.run(batch_with(1, version=0))
    learner.run(batch_with(2, version=1))
    later = pass_to_check(learner.plan_batch(batch_with(4, version=2)), quick(), lag=1)
    assert later is not None
    before = by_sample(learner, later)
    learner.run(batch_with(3, version=2))
    return learner, before


def test_tokens_of_the_policy_before_are_compared_if_there_are_none_of_the_newest(tmp_path: Path) -> None:
    digests = set()
    for wrong, share in ((None, 0.0), (2, 1 / 3)):
        learner, before = trained_three_steps(tiny_model_dir(tmp_path / "model"))
        logprobs = {n: value + (1e-3 if n == wrong else 0.0) for n, value in before.items()}
        report = learner.run(batch_with(4, version=2, logprobs=logprobs))
        assert report.metrics["train/compared_tokens"] == 3
        assert report.metrics["train/inexact_share"] == pytest.approx(share)
        if wrong is None:
            assert report.unequal is None
            digests.add(learner.model.digest())
        else:
            assert report.unequal is not None
            assert (report.unequal.sample, report.unequal.lag, report.unequal.publication) == (wrong, 1, 12)
            assert report.unequal.trained == before[wrong]
    learner, before = trained_three_steps(tiny_model_dir(tmp_path / "model"))
    learner.comparison.free_memory()
    report = learner.run(batch_with(4, version=2, logprobs=before))
    assert report.metrics["train/compared_tokens"] == 0, "there is no copy of the weights"
    assert report.metrics["train/inexact_share"] is None
    assert digests == {learner.model.digest()}, "a check changes nothing"


def test_a_check_takes_the_shortest_rows_of_a_pass_with_shared_prefixes(learner: TrainStep) -> None:
    """The rows are found in the packed tokens again."""
    config = quick()
    planned = learner.plan_batch(recorded_batch(3, groups=4))
    passes = [one for part in planned for one in part.microbatches]
    for one in passes:
        assert one.lags_N is not None
        one.lags_N[:] = 1
    micro = pass_to_check(planned, config, lag=1)
    assert micro is not None
    assert len(micro.targets_N) == sum(part.num_trained for part in planned)
    rows = {(str(r.group_id), *r.place): r for r in flatten(recorded_batch(3, groups=4), config)}
    with torch.no_grad():
        found = learner.model.token_logprobs(micro)[0]
        for n, source in enumerate(micro.sources):
            own = rows[str(source.group_id), source.sample, source.sequence]
            assert micro.targets_N[micro.row_of_N == n].tolist() == own.targets.tolist()
            assert micro.index_N is not None
            assert (micro.index_N[micro.row_of_N == n] - 1).tolist() == own.predicted_at.tolist()
        whole = torch.cat([learner.model.token_logprobs(m)[0] for m in passes])
    torch.testing.assert_close(found.sort().values, whole.sort().values)


def test_with_recomputed_keys_no_token_is_left_out(learner: TrainStep) -> None:
    tokens = row([1, 5, 6, 7], [1, 2, 3])
    tokens = replace(tokens, versions=np.array([-1, 12, 13, 13], dtype=np.int32))
    planned = learner.plan_batch(batch_of(4, [[sample(tokens, reward=reward) for reward in (0.0, 1.0)]], oldest=2))
    for has_mixed, expected in ((True, 0), (False, 4)):
        (part,) = with_lags(planned, {12: 2, 13: 3}, step=4, has_mixed=has_mixed)
        learner.step = 3
        report = learner.train([part], step=4)
        assert report.metrics["train/compared_tokens"] == expected
        assert report.metrics["train/mixed_cache_share"] == (4 / 6 if has_mixed else 0)


def test_weights_are_exchanged_and_put_back() -> None:
    weights = [torch.full((2,), 1.0), torch.full((3,), 2.0)]
    earlier = EarlierWeights(weights)
    earlier.keep(version=4)
    torch._foreach_add_(weights, 1.0)
    with earlier.in_use():
        assert [float(weight[0]) for weight in weights] == [1.0, 2.0]
    assert [float(weight[0]) for weight in weights] == [2.0, 3.0]
    earlier.drop()
    earlier.keep(version=5)
    assert earlier.version == -1


@pytest.mark.parametrize(
    ("own", "sampler", "is_merged", "expected"),
    [
        (None, EXACT, False, None),
        (None, replace(EXACT, machine={"GPU": "H200", "torch": "2.11", "driver": "580"}), False, None),
        ("its sequences are not packed", EXACT, False, "trainer: its sequences are not packed"),
        (None, EXACT, True, "the adapters are merged for the policy servers"),
        (None, None, False, "no policy server has said yet that its logprobs are exact"),
        (None, replace(EXACT, inexact_because="its dtype is float16"), False, "policy server: its dtype is float16"),
        (None, replace(EXACT, machine={"GPU": "H100"}), False, "the policy server has GPU H100 instead of H200"),
    ],
)
def test_the_reason_why_bits_may_differ_is_named(
    own: str | None, sampler: SamplerExactness | None, is_merged: bool, expected: str | None
) -> None:
    assert why_inexact(own, sampler, EXACT.machine, is_merged=is_merged) == expected


def test_samplers_are_exact_together_if_all_are_on_equal_machines() -> None:
    assert SamplerExactness.of_all([]) is None
    assert SamplerExactness.of_all([EXACT, EXACT]) == EXACT
    other = SamplerExactness.of_all([EXACT, replace(EXACT, machine={"GPU": "H100"})])
    assert other is not None
    assert other.inexact_because == "the policy servers have different GPUs or libraries"
    mixed = SamplerExactness.of_all([replace(EXACT, recomputes=True), replace(EXACT, inexact_because="fast")])
    assert mixed is not None
    assert (mixed.inexact_because, mixed.recomputes) == ("fast", False)


# In float64, the bits of a float32 logprob do not depend on the pass.
PROBED = [
    ProbedAnswer(
        how=how,
        prompt=np.array(prompt, dtype=np.int32),
        tokens=np.array([6, 7, 8], dtype=np.int32),
        logprobs=np.zeros(3, dtype=np.float32),
        temperature=temperature,
    )
    for how, prompt, temperature in (("alone", [3, 4, 5], 1.0), ("in a batch", [3, 4, 5, 9], 0.7))
]


def with_logprobs_of(model: PolicyModel, answer: ProbedAnswer) -> ProbedAnswer:
    (micro,) = plan_minibatch([row_of_answer(0, answer)], TrainerConfig(), is_packed=model.is_packed).microbatches
    with torch.no_grad():
        return replace(answer, logprobs=model.token_logprobs(micro)[0].float().numpy())


def test_a_probe_with_one_other_bit_is_described() -> None:
    model = PolicyModel.over(build_model().double(), TrainerConfig())
    answers = [with_logprobs_of(model, answer) for answer in PROBED]
    assert unequal_answers(model, TrainerConfig(), answers) is None
    logprobs = answers[1].logprobs.copy()
    logprobs[1] = np.nextafter(logprobs[1], np.float32(-9.0))
    found = unequal_answers(model, TrainerConfig(), [answers[0], replace(answers[1], logprobs=logprobs)])
    assert found is not None
    assert found.startswith("2 of 12 logprobs")  # in the pass over all, and in its own
    assert "(sampled alone: 0 of 6, in a batch: 2 of 6)" in found
    assert "token 1 after a prompt of 4, sampled in a batch" in found
    assert f"{float(logprobs[1])!r} in the engine, {float(answers[1].logprobs[1])!r} in the trainer" in found


def test_a_probe_is_compared_only_where_a_trainer_is_exact_and_changes_nothing_in_the_model_of_the_engine() -> None:
    module = build_model()
    before = [parameter.data_ptr() for parameter in module.parameters()]
    assert compare_probe(module, PROBED) is None
    assert [parameter.data_ptr() for parameter in module.parameters()] == before
    assert module.config._attn_implementation != "rollbook_packed"
