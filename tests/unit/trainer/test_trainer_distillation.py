"""Distillation: the gap to a teacher as an advantage of each token, alone and beside rewards."""

from pathlib import Path

import numpy as np
import pytest
import torch

from rollbook.contracts.errors import RunError
from rollbook.trainer.checkpoints.checkpoints import initial_learner
from rollbook.trainer.data.minibatches import plan_minibatch
from rollbook.trainer.data.rows import flatten
from rollbook.trainer.losses.corrections import top_k_divergence
from tests.parts.trainer.batches import VOCABULARY_SIZE, batch_of, quick, row, sample, tiny_model_dir

TAUGHT = row([1, 5, 6, 7], [1, 3], logprob=-2.0).with_columns(teacher_logprobs=[np.nan, -0.5, np.nan, -3.0])


def advantages(step: int = 1, **settings: object) -> list[list[float]]:
    batch = batch_of(step, [[sample(TAUGHT, reward=1.0), sample(TAUGHT, reward=0.0)]])
    found = []
    for train_row in flatten(batch, quick(**settings)):
        assert train_row.token_advantages is not None
        found.append(train_row.token_advantages.tolist())
    return found


def test_the_gap_to_the_teacher_is_the_advantage_or_is_added_to_that_of_the_rewards() -> None:
    assert advantages(loss="distill") == [[1.5, -1.0]] * 2
    both = advantages(advantage="dr_grpo", distill_coef=0.1)
    np.testing.assert_allclose(both, [[0.5 + 0.15, 0.5 - 0.1], [-0.5 + 0.15, -0.5 - 0.1]], rtol=1e-6)
    late = advantages(step=4, advantage="dr_grpo", distill_coef=0.1, distill_until=6)
    np.testing.assert_allclose(late, [[0.5 + 0.075, 0.5 - 0.05], [-0.5 + 0.075, -0.5 - 0.05]], rtol=1e-6)


def test_a_batch_without_scores_of_a_teacher_stops_the_run_with_the_setting() -> None:
    with pytest.raises(RunError, match=r"no scores of a teacher.*set \[rollout.teacher\]"):
        flatten(batch_of(1, [[sample(reward=1.0), sample(reward=0.0)]]), quick(loss="distill"))
    with pytest.raises(RunError, match=r"set rollout.teacher.top_k"):
        flatten(batch_of(1, [[sample(TAUGHT, reward=1.0)]]), quick(loss="distill", distill_kl="forward"))
    beside = flatten(batch_of(1, [[sample(reward=1.0), sample(reward=0.0)]]), quick(distill_coef=0.1))
    assert [one.token_advantages for one in beside] == [None, None], "a task without a teacher is trained on its reward"


def test_distillation_moves_the_policy_towards_the_teacher(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    learner = initial_learner(tiny_model_dir(tmp_path / "model"), quick(loss="distill", old_logprobs=None))
    good, bad = row([1, 5, 6], [2], logprob=-2.7), row([1, 5, 7], [2], logprob=-2.7)
    taught = [
        sample(one.with_columns(teacher_logprobs=[np.nan, np.nan, score]), reward=0.0)
        for one, score in ((good, -0.1), (bad, -6.0))
    ]
    rows = [flatten(batch_of(1, [[one, taught[1]]]), quick(loss="distill"))[0] for one in taught]
    before = [learner.mean_logprob([one]) for one in rows]
    for step in range(1, 6):
        learner.run(batch_of(step, [taught]))
    after = [learner.mean_logprob([one]) for one in rows]
    assert after[0] > before[0]
    assert after[1] < before[1]


def dense(kind: str, log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    """The divergence over all tokens, written out."""
    if kind == "forward":
        return (log_q.exp() * (log_q - log_p)).sum(-1)
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def merged(log_p: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The distribution with all tokens but these as one."""
    kept = log_p.gather(-1, ids)
    return torch.cat([kept, torch.log1p(-kept.exp().sum(-1, keepdim=True))], -1)


@pytest.mark.parametrize("kind", ["forward", "reverse"])
def test_the_divergence_over_k_tokens_is_the_dense_one_with_the_rest_as_one_token(kind: str) -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(7, 12, generator=generator, dtype=torch.float64).requires_grad_()
    teacher = torch.log_softmax(torch.randn(7, 12, generator=generator, dtype=torch.float64), -1)
    log_p = torch.log_softmax(logits, -1)
    whole = dense(kind, log_p, teacher)
    for count in (12, 4):
        values, ids = teacher.topk(count, dim=-1)
        expected = whole if count == 12 else dense(kind, merged(log_p, ids), merged(teacher, ids))
        found = top_k_divergence(log_p.gather(-1, ids), values, kind=kind)
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)
        gradients = [torch.autograd.grad(one.square().sum(), logits, retain_graph=True)[0] for one in (found, expected)]
        torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-6, atol=1e-9)
        assert (found >= 0).all()
        assert (found <= whole + 1e-9).all(), "less is known of the rest"
    unknown = torch.full((7, 4), torch.nan, dtype=torch.float64)
    assert top_k_divergence(log_p[:, :4], unknown, kind=kind).tolist() == [0.0] * 7


@pytest.mark.parametrize("kind", ["forward", "reverse"])
def test_a_step_trains_the_dense_divergence_from_the_listed_tokens_beside_rewards_with_its_weight(
    tmp_path: Path, kind: str
) -> None:
    torch.set_num_threads(1)
    directory = tiny_model_dir(tmp_path / "model")
    rng = np.random.default_rng(1)
    ids = np.tile(np.arange(VOCABULARY_SIZE), (4, 1))
    logits = torch.from_numpy(rng.normal(size=ids.shape))
    # Stored as float16, which rounds.
    scores = torch.log_softmax(logits, -1).half().double()
    given = row([1, 5, 6, 7], [1, 3]).with_columns(
        teacher_logprobs=[np.nan, -0.5, np.nan, -3.0], teacher_top_ids=ids, teacher_top_logprobs=scores.numpy()
    )
    plain = row([1, 5, 6, 7], [2])
    batch = batch_of(3, [[sample(given, reward=1.0), sample(plain, reward=1.0)]])

    def trained(step: int, **settings: object) -> dict[str, float | None]:
        learner = initial_learner(directory, quick(distill_kl=kind, **settings))
        learner.step = step - 1
        return learner.run(batch_of(step, [batch.groups[0].samples])).metrics

    learner = initial_learner(directory, quick())
    with torch.no_grad():
        log_p = torch.log_softmax(learner.model.module(torch.tensor([[1, 5, 6]])).logits[0].double(), -1)
    expected = dense(kind, log_p[[0, 2]], scores[[1, 3]])
    alone = trained(1, loss="distill")
    assert alone["train/teacher_kl"] == pytest.approx(float(expected.mean()), abs=1e-3)
    assert alone["train/loss"] == pytest.approx(float(expected.sum()) / 3, abs=1e-3), (
        "a token without tops adds nothing"
    )
    late = trained(3, loss="reinforce", advantage="dr_grpo", distill_coef=0.5, distill_until=4)
    assert late["train/loss"] == pytest.approx(0.25 * float(expected.sum()) / 3, abs=1e-3)
    over = trained(5, loss="reinforce", advantage="dr_grpo", distill_coef=0.5, distill_until=4)
    assert over["train/loss"] == 0.0


def test_listed_tokens_of_rows_with_other_widths_share_a_pass_and_unknown_ids_are_refused(tmp_path: Path) -> None:
    def listed(ids: list[list[int]]) -> object:
        return row([1, 5, 6], [1, 2]).with_columns(
            teacher_logprobs=[np.nan, -1.0, -1.0],
            teacher_top_ids=ids,
            teacher_top_logprobs=np.where(np.array(ids) < 0, np.nan, -1.5),
        )

    config = quick(loss="distill", distill_kl="forward")
    rows = [listed([[-1], [4], [7]]), listed([[-1, -1], [4, 5], [7, -1]]), row([1, 5, 6], [2])]
    batch = batch_of(1, [[sample(one, reward=0.0) for one in rows]])  # type: ignore[arg-type]
    (micro,) = plan_minibatch(flatten(batch, config), config, is_packed=False).microbatches
    assert micro.top_ids_NK is not None
    assert sorted(micro.top_ids_NK.tolist()) == sorted([[4, -1], [7, -1], [4, 5], [7, -1], [-1, -1]])
    learner = initial_learner(tiny_model_dir(tmp_path / "model"), config)
    bad = batch_of(1, [[sample(listed([[-1], [VOCABULARY_SIZE], [7]]), reward=0.0)]])  # type: ignore[arg-type]
    with pytest.raises(RunError, match=f"token id {VOCABULARY_SIZE}"):
        learner.run(bad)
    assert learner.run(batch).metrics["train/loss"] != 0.0
