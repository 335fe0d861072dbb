"""Whole steps against published objectives.

Each objective is written with plain loops over tables of log-probabilities, as its source writes it, and has to be minimised. The
step must report its value, and its gradient must be that of finite differences of the objective.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rollbook.contracts.trajectory import TokenRow
from rollbook.trainer.checkpoints.checkpoints import initial_learner
from rollbook.trainer.step import TrainStep
from tests.parts.trainer.batches import BUILD, VOCABULARY_SIZE, batch_of, quick, sample, tiny_model_dir

Table = list[list[float]]
"""For each position of a sequence, log pi of every token."""


@dataclass(frozen=True)
class Answer:
    ids: list[int]
    said: list[int]
    """Positions of the policy's tokens; those between them are of the environment."""
    moved: list[float]
    """log pi - log mu of each of the policy's tokens."""
    advantages: list[float]
    away: list[float]
    """log reference - log pi."""


ANSWERS = (
    Answer([1, 5, 6, 9, 7, 8], [2, 4, 5], [0.02, -0.5, 0.9], [1.0, 1.0, -0.4], [0.3, -0.2, 0.6]),
    Answer([1, 7, 10, 11], [2, 3], [-0.7, -0.9], [-0.8, -0.8], [-0.9, 0.1]),
    Answer([1, 6, 5, 12, 13, 4, 9], [2, 3, 6], [0.35, 0.12, -0.15], [0.6, -1.2, 0.3], [0.4, 0.7, -0.3]),
    Answer([1, 8, 4], [2], [1.6], [0.5], [-0.5]),
)
K = 3
Q: list[Table] = [
    torch.log_softmax(torch.from_numpy(np.random.default_rng(n).normal(size=(len(a.ids), VOCABULARY_SIZE))), -1)
    .half()  # stored so
    .double()
    .tolist()
    for n, a in enumerate(ANSWERS)
]
"""The teacher."""


@dataclass(frozen=True)
class Data:
    """What objectives read besides log pi: constants."""

    mu: list[list[float]]
    """Of the policy's tokens, in the order of `said`."""
    reference: list[list[float]]
    advantages: list[list[float]]


def pi(tables: Sequence[Table], i: int, t: int) -> float:
    """log pi of token `t` of the policy in answer `i`. Row p of a table predicts token p + 1."""
    at = ANSWERS[i].said[t]
    return tables[i][at - 1][ANSWERS[i].ids[at]]


Objective = Callable[[Sequence[Table], Sequence[Table], Data], float]
"""The second tables are the first ones behind a stop-gradient."""


def mean_over_answers(term: Callable[[int, int], float]) -> float:
    """1/G sum_i 1/|y_i| sum_t."""
    answers = [[term(i, t) for t in range(len(a.said))] for i, a in enumerate(ANSWERS)]
    return sum(sum(values) / len(values) for values in answers) / len(answers)


def mean_over_tokens(term: Callable[[int, int], float]) -> float:
    """1 / (sum_i |y_i|) sum_i sum_t."""
    values = [term(i, t) for i, a in enumerate(ANSWERS) for t in range(len(a.said))]
    return sum(values) / len(values)


def clip(value: float, low: float, high: float) -> float:
    return max(low, min(high, value))


def gspo_token(now: Sequence[Table], frozen: Sequence[Table], data: Data) -> float:
    """Eq. 13 to 15 of arXiv:2507.18071."""

    def term(i: int, t: int) -> float:
        length = len(ANSWERS[i].said)
        s_i = math.prod(math.exp(pi(frozen, i, k)) / math.exp(data.mu[i][k]) for k in range(length)) ** (1 / length)
        s_it = s_i * math.exp(pi(now, i, t)) / math.exp(pi(frozen, i, t))
        a = data.advantages[i][t]
        return min(s_it * a, clip(s_it, 1 - 0.3, 1 + 0.2) * a)

    return -mean_over_answers(term)


def sapo(now: Sequence[Table], frozen: Sequence[Table], data: Data) -> float:
    """Eq. 5 and 6 of arXiv:2511.20347."""

    def term(i: int, t: int) -> float:
        ratio = math.exp(pi(now, i, t)) / math.exp(data.mu[i][t])
        a = data.advantages[i][t]
        tau = 1.0 if a > 0 else 1.05
        return 1 / (1 + math.exp(-tau * (ratio - 1))) * 4 / tau * a

    return -mean_over_answers(term)


def dppo(now: Sequence[Table], frozen: Sequence[Table], data: Data) -> float:
    """The binary TV mask of arXiv:2602.04879."""

    def term(i: int, t: int) -> float:
        p, mu, a = math.exp(pi(frozen, i, t)), math.exp(data.mu[i][t]), data.advantages[i][t]
        divergence = abs(mu - p)
        if divergence > 0.03 and ((a > 0 and p / mu > 1) or (a < 0 and p / mu < 1)):
            return 0.0
        return math.exp(pi(now, i, t)) / mu * a

    return -mean_over_tokens(term)


def m2po(now: Sequence[Table], frozen: Sequence[Table], data: Data) -> float:
    """Tokens are masked, those with the largest M_2 = (log r)^2 first, while the mean of the others is above the threshold
    (arXiv:2510.01161)."""
    second = {
        (i, t): (pi(frozen, i, t) - data.mu[i][t]) ** 2 for i, a in enumerate(ANSWERS) for t in range(len(a.said))
    }
    kept = set(second)
    while sum(second[one] for one in kept) / len(kept) > 0.2:
        kept.remove(max(kept, key=lambda one: second[one]))
    assert 2 < len(kept) < len(second)

    def term(i: int, t: int) -> float:
        ratio = math.exp(pi(now, i, t)) / math.exp(data.mu[i][t])
        return ((i, t) in kept) * ratio * data.advantages[i][t]

    return -mean_over_tokens(term)


def grpo_term(now: Sequence[Table], data: Data, i: int, t: int) -> float:
    ratio, a = math.exp(pi(now, i, t)) / math.exp(data.mu[i][t]), data.advantages[i][t]
    return min(ratio * a, clip(ratio, 0.8, 1.2) * a)


def masked_grpo(now: Sequence[Table], frozen: Sequence[Table], data: Data) -> float:
    """Off-policy sequence masking, section 3.1 of arXiv:2512.02556."""
    masks = []

    def term(i: int, t: int) -> float:
        length = len(ANSWERS[i].said)
        distance = sum(data.mu[i][k] - pi(frozen, i, k) for k in range(length)) / length
        mask = 0.0 if data.advantages[i][t] < 0 and distance > 0.4 else 1.0
        masks.append(mask)
        return grpo_term(now, data, i, t) * mask

    value = -mean_over_answers(term)
    assert set(masks) == {0.0, 1.0}
    return value


def weighted_kl(now: Sequence[Table], frozen: Sequence[Table], data: Data) -> float:
    """The unbiased KL estimate of arXiv:2512.02556, as a penalty of GRPO."""

    def term(i: int, t: int) -> float:
        p, mu, reference = math.exp(pi(now, i, t)), math.exp(data.mu[i][t]), math.exp(data.reference[i][t])
        return grpo_term(now, data, i, t) - 0.3 * (p / mu) * (reference / p - math.log(reference / p) - 1)

    return -mean_over_answers(term)


def echo(now: Sequence[Table], frozen: Sequence[Table], data: Data) -> float:
    """arXiv:2605.24517: the loss of GRPO on the policy's tokens, and the mean cross-entropy of what its actions led to."""
    observed = [
        -now[i][at - 1][a.ids[at]]
        for i, a in enumerate(ANSWERS)
        for at in range(a.said[0], a.said[-1])
        if at not in a.said
    ]
    assert len(observed) == 3
    policy = -mean_over_tokens(lambda i, t: grpo_term(now, data, i, t))
    return policy + 0.25 * sum(observed) / len(observed)


def listed(i: int, t: int, table: Table) -> tuple[list[float], list[float]]:
    """p and q of the K tokens that the teacher likes best and, as one, of all others."""
    q_of = Q[i][ANSWERS[i].said[t]]
    best = sorted(range(VOCABULARY_SIZE), key=lambda v: -q_of[v])[:K]
    p = [math.exp(table[ANSWERS[i].said[t] - 1][v]) for v in best]
    q = [math.exp(q_of[v]) for v in best]
    return [*p, 1 - sum(p)], [*q, 1 - sum(q)]


def divergence(p: Sequence[float], q: Sequence[float]) -> float:
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))


def forward_kl(now: Sequence[Table], frozen: Sequence[Table], data: Data) -> float:
    return mean_over_tokens(lambda i, t: divergence(*reversed(listed(i, t, now[i]))))


def reverse_kl(now: Sequence[Table], frozen: Sequence[Table], data: Data) -> float:
    return mean_over_tokens(lambda i, t: divergence(*listed(i, t, now[i])))


def sampled_kl(now: Sequence[Table], frozen: Sequence[Table], data: Data) -> float:
    """On-policy distillation: the advantage of a token is log q - log mu."""

    def term(i: int, t: int) -> float:
        at = ANSWERS[i].said[t]
        gap = Q[i][at][ANSWERS[i].ids[at]] - data.mu[i][t]
        return math.exp(pi(now, i, t)) / math.exp(data.mu[i][t]) * gap

    return -mean_over_tokens(term)


GRPO = {"loss": "grpo", "advantage": "producer"}
CASES: dict[str, tuple[dict[str, Any], Objective]] = {
    "gspo_token": ({"loss": "gspo_token", "advantage": "producer", "clip_low": 0.3, "clip_high": 0.2}, gspo_token),
    "sapo": ({"loss": "sapo", "advantage": "producer", "reduction": "sequence_mean"}, sapo),
    "dppo": ({"loss": "dppo", "advantage": "producer", "divergence_bound": 0.03}, dppo),
    "m2po": ({"loss": "m2po", "advantage": "producer", "m2_bound": 0.2}, m2po),
    "off_policy_mask": ({**GRPO, "reduction": "sequence_mean", "off_policy_mask": 0.4}, masked_grpo),
    "k3_weighted": (
        {**GRPO, "reduction": "sequence_mean", "kl_coef": 0.3, "kl_estimator": "k3_weighted"},
        weighted_kl,
    ),
    "observation_coef": ({**GRPO, "observation_coef": 0.25}, echo),
    "distill_forward": ({"loss": "distill", "distill_kl": "forward"}, forward_kl),
    "distill_reverse": ({"loss": "distill", "distill_kl": "reverse"}, reverse_kl),
    "distill_sampled": ({"loss": "distill"}, sampled_kl),
}


def tables_of(learner: TrainStep) -> list[Tensor]:
    logits = [learner.model.module(torch.tensor([a.ids])).logits[0].double() for a in ANSWERS]
    return [torch.log_softmax(one, -1) for one in logits]


def recorded(tables: Sequence[Table]) -> tuple[list[TokenRow], Data]:
    """The answers as rows of tokens, and what the objectives read of them."""
    rows, mus, references = [], [], []
    for i, a in enumerate(ANSWERS):
        own = [pi(tables, i, t) for t in range(len(a.said))]
        columns = {name: np.zeros(len(a.ids)) for name in ("mu", "reference", "advantages", "teacher")}
        columns["mu"][a.said] = np.array(own) - a.moved
        columns["reference"][a.said] = np.minimum(np.array(own) + a.away, -0.01)
        columns["advantages"][a.said] = a.advantages
        mask = np.isin(np.arange(len(a.ids)), a.said)
        order = np.argsort([[-q for q in row] for row in Q[i]], axis=1)[:, :K]
        rows.append(
            TokenRow.of(
                token_ids=a.ids,
                logprobs=columns["mu"],
                loss_mask=mask,
                versions=np.where(mask, 0, -1),
                advantages=columns["advantages"],
                reference_logprobs=columns["reference"],
                teacher_logprobs=[Q[i][at][token] for at, token in enumerate(a.ids)],
                teacher_top_ids=order,
                teacher_top_logprobs=np.take_along_axis(np.array(Q[i]), order, axis=1),
            )
        )
        mus.append(columns["mu"][a.said].tolist())
        references.append(columns["reference"][a.said].tolist())
    return rows, Data(mus, references, [a.advantages for a in ANSWERS])


def slopes(value: Callable[[Sequence[Table]], float], tables: list[Table]) -> list[list[list[float]]]:
    """Finite differences by every log-probability."""
    step, found = 1e-6, []
    for table in tables:
        found.append([[0.0] * len(row) for row in table])
        for at, row in enumerate(table):
            for token, logprob in enumerate(row):
                ends = []
                for moved in (logprob + step, logprob - step):
                    row[token] = moved
                    ends.append(value(tables))
                row[token] = logprob
                found[-1][at][token] = (ends[0] - ends[1]) / (2 * step)
    return found


@pytest.mark.parametrize("name", sorted(CASES))
def test_a_step_has_the_value_and_the_gradient_of_the_published_objective(tmp_path: Path, name: str) -> None:
    torch.set_num_threads(1)
    settings, objective = CASES[name]
    # Probabilities that differ: a new model has nearly equal ones.
    directory = tiny_model_dir(tmp_path / "model", build=BUILD.model_copy(update={"initializer_range": 0.5}))
    config = quick(lr=1e-9, max_grad_norm=1e9, old_logprobs="engine", **settings)
    learner = initial_learner(directory, config)
    found = tables_of(learner)
    tables, frozen = [one.tolist() for one in found], [one.tolist() for one in found]
    rows, data = recorded(tables)
    value = objective(tables, frozen, data)
    by_table = slopes(lambda now: objective(now, frozen, data), tables)
    products = [(one * torch.tensor(by, dtype=torch.float64)).sum() for one, by in zip(found, by_table, strict=True)]
    torch.stack(products).sum().backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    expected = {n: p.grad.clone() for n, p in learner.model.module.named_parameters() if p.grad is not None}
    learner.model.discard_gradients()

    report = learner.run(batch_of(1, [[sample(row, reward=1.0) for row in rows]]))
    assert report.metrics["train/loss"] == pytest.approx(value, rel=1e-5, abs=1e-6)
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    assert largest > 0.01
    for parameter_name, parameter in learner.model.module.named_parameters():
        gradient = learner.optimizer.state[parameter]["exp_avg"] / (1 - config.betas[0])
        torch.testing.assert_close(gradient, expected[parameter_name], rtol=1e-3, atol=1e-4 * largest)
