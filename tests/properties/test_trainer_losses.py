"""Losses and corrections equal a float64 reference computed token by token; gradients equal finite differences."""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from rollbook.trainer.config import TrainerConfig
from rollbook.trainer.loss_settings import LOSS_DEFAULTS
from rollbook.trainer.losses.corrections import correction, k3_divergence, kl_penalty, off_policy_mask
from rollbook.trainer.losses.inputs import LossInputs, LossSettings, LossTerms
from rollbook.trainer.losses.pass_loss import loss_settings
from rollbook.trainer.losses.registry import LOSSES

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Tokens:
    current: Array
    old: Array
    sampled: Array
    advantage: Array
    row: NDArray[np.int64]

    def inputs(self, current: torch.Tensor | None = None) -> LossInputs:
        return LossInputs(
            current_N=torch.from_numpy(self.current) if current is None else current,
            old_N=torch.from_numpy(self.old),
            sampled_N=torch.from_numpy(self.sampled),
            advantages_N=torch.from_numpy(self.advantage),
            row_of_N=torch.from_numpy(self.row),
            num_rows=int(self.row.max()) + 1,
        )


@st.composite
def tokens(draw: st.DrawFn) -> Tokens:
    """Up to four sequences with interleaved tokens, as prefix sharing may order them."""
    count = draw(st.integers(1, 16))
    column = st.lists(st.floats(-1.5, 1.5), min_size=count, max_size=count)
    old = -2.0 + np.array(draw(column))
    numbers = draw(st.lists(st.integers(0, 3), min_size=count, max_size=count))
    row = np.unique(numbers, return_inverse=True)[1].astype(np.int64)
    by_row = draw(st.lists(st.floats(-3, 3), min_size=4, max_size=4))
    return Tokens(
        current=old + np.array(draw(column)),
        old=old,
        sampled=old + np.array(draw(column)),
        advantage=np.array([by_row[r] for r in row]),
        row=row,
    )


def settings_of(name: str) -> LossSettings:
    needs = {"reduction_length": 8} if name == "dr_grpo" else {}
    return loss_settings(TrainerConfig.model_validate({"loss": name, **needs}).recipe)


# References in plain Python, one token at a time. `frozen` are the values behind a stop-gradient.


def clipped(ratio: float, a: float, s: LossSettings) -> float:
    if a >= 0:
        return -a * min(ratio, 1 + s.clip_high)
    value = -a * max(ratio, 1 - s.clip_low)
    return min(value, -a * s.dual_clip)


def mean_log_ratio(t: Tokens, current: Array, row: int) -> float:
    members = [n for n in range(len(t.row)) if t.row[n] == row]
    return math.fsum(current[n] - t.old[n] for n in members) / len(members)


def bounded(value: float, low: float, high: float) -> float:
    return low if value < low else high if value > high else value


Reference = Callable[[Tokens, Array, Array, int, LossSettings], float]
REFERENCES: dict[str, Reference] = {
    "grpo": lambda t, c, frozen, n, s: clipped(math.exp(c[n]) / math.exp(t.old[n]), t.advantage[n], s),
    "gspo": lambda t, c, frozen, n, s: clipped(math.exp(mean_log_ratio(t, c, t.row[n])), t.advantage[n], s),
    "cispo": lambda t, c, frozen, n, s: (
        -bounded(math.exp(frozen[n] - t.old[n]), 1 - s.clip_low, 1 + s.clip_high) * t.advantage[n] * c[n]
    ),
    "importance_sampling": lambda t, c, frozen, n, s: -math.exp(c[n]) / math.exp(t.old[n]) * t.advantage[n],
    "reinforce": lambda t, c, frozen, n, s: -t.advantage[n] * c[n],
    "decoupled": lambda t, c, frozen, n, s: (
        clipped(math.exp(c[n] - t.old[n]), t.advantage[n], s) * math.exp(t.old[n]) / math.exp(t.sampled[n])
    ),
    "dro": lambda t, c, frozen, n, s: -(t.advantage[n] * c[n] - 0.5 * s.dro_beta * (c[n] - t.old[n]) ** 2),
}


def kept_by_second_moment(t: Tokens, current: Array, bound: float) -> list[int]:
    """Tokens that are left after the one with the largest (log r)^2 was removed until the mean is at most the bound."""
    left = sorted(range(len(t.row)), key=lambda n: (current[n] - t.old[n]) ** 2)
    while left and math.fsum((current[n] - t.old[n]) ** 2 for n in left) / len(left) > bound:
        left.pop()
    return left


def sapo(t: Tokens, current: Array, frozen: Array, n: int, s: LossSettings) -> float:
    tau = s.sapo_tau if t.advantage[n] > 0 else s.sapo_tau_negative
    return -float(t.advantage[n]) * 4 / tau / (1 + math.exp(-tau * (math.exp(current[n] - t.old[n]) - 1)))


def dppo(t: Tokens, current: Array, frozen: Array, n: int, s: LossSettings) -> float:
    moved = math.exp(frozen[n]) - math.exp(t.old[n])
    is_beyond = moved > s.divergence_bound if t.advantage[n] > 0 else moved < -s.divergence_bound
    return 0.0 if is_beyond else -math.exp(current[n] - t.old[n]) * float(t.advantage[n])


REFERENCES["sapo"], REFERENCES["dppo"] = sapo, dppo
REFERENCES["m2po"] = lambda t, c, frozen, n, s: (
    -math.exp(c[n] - t.old[n]) * t.advantage[n] if n in kept_by_second_moment(t, frozen, s.m2_bound) else 0.0
)
REFERENCES["gspo_token"] = lambda t, c, frozen, n, s: clipped(
    math.exp(mean_log_ratio(t, frozen, t.row[n])) * math.exp(c[n] - frozen[n]), t.advantage[n], s
)
REFERENCES["distill"] = REFERENCES["importance_sampling"]
REFERENCES["dr_grpo"] = REFERENCES["dapo"] = REFERENCES["grpo"]


def reference(name: str, t: Tokens, current: Array, frozen: Array) -> Array:
    s = settings_of(name)
    return np.array([REFERENCES[name](t, current, frozen, n, s) for n in range(len(t.row))])


def is_near_clip_bound(name: str, t: Tokens) -> bool:
    """A clipped loss is not differentiable at the clip bound, so finite differences across it are not compared."""
    s = settings_of(name)
    ratios = [math.exp(c - o) for c, o in zip(t.current, t.old, strict=True)]
    if name == "m2po":
        squares = np.sort((t.current - t.old) ** 2)
        means = np.cumsum(squares) / np.arange(1, len(squares) + 1)
        # Among equal squares, which of them is masked is a matter of rounding.
        return bool((np.abs(means - s.m2_bound) < 1e-6).any() or (np.diff(squares) < 1e-9).any())
    if name == "dppo":
        return bool((np.abs(np.abs(np.exp(t.current) - np.exp(t.old)) - s.divergence_bound) < 1e-6).any())
    if name in ("gspo", "gspo_token"):
        ratios = [math.exp(mean_log_ratio(t, t.current, r)) for r in t.row]
    bounds = [1 - s.clip_low, 1 + s.clip_high, s.dual_clip]
    return any(abs(ratio - bound) < 1e-4 for ratio in ratios for bound in bounds if math.isfinite(bound))


@pytest.mark.parametrize("name", sorted(LOSSES))
@given(t=tokens())
@settings(max_examples=40)
def test_every_loss_equals_its_reference(name: str, t: Tokens) -> None:
    assume(name not in ("m2po", "dppo") or not is_near_clip_bound(name, t))
    found = LOSSES[name](t.inputs(), settings_of(name)).loss_N.numpy()
    np.testing.assert_allclose(found, reference(name, t, t.current, t.current), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", sorted(LOSSES))
@given(t=tokens())
@settings(max_examples=25)
def test_every_gradient_equals_finite_differences_of_the_reference(name: str, t: Tokens) -> None:
    assume(not is_near_clip_bound(name, t))
    current = torch.from_numpy(t.current.copy()).requires_grad_()
    LOSSES[name](t.inputs(current), settings_of(name)).loss_N.sum().backward()  # type: ignore[no-untyped-call]
    assert current.grad is not None
    step = 1e-6
    for n in range(len(t.row)):
        moved = np.zeros(len(t.row))
        moved[n] = step
        above = math.fsum(reference(name, t, t.current + moved, t.current))
        below = math.fsum(reference(name, t, t.current - moved, t.current))
        assert float(current.grad[n]) == pytest.approx((above - below) / (2 * step), rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_a_loss_reads_exactly_its_declared_settings(name: str) -> None:
    read: set[str] = set()

    class RecordingSettings:
        def __getattr__(self, attribute: str) -> float:
            read.add(attribute)
            return float(getattr(settings_of(name), attribute))

    values = np.linspace(-1, -0.1, 4)
    t = Tokens(values, values, values, np.ones(4), np.zeros(4, dtype=np.int64))
    LOSSES[name](t.inputs(), RecordingSettings())  # type: ignore[arg-type]  # has the attributes of the settings
    assert read == LOSS_DEFAULTS[name].keys() & {field.name for field in fields(LossSettings)}


def test_only_tokens_clipped_in_the_direction_of_their_advantage_count_as_clipped() -> None:
    ratios = np.array([1.5, 1.5, 0.5, 0.5, 1.1, 1.5, 9.0])
    advantages = np.array([1.0, -1.0, 1.0, -1.0, 1.0, 0.0, -1.0])
    current = torch.from_numpy(np.log(ratios)).requires_grad_()
    zeros = np.zeros(7)
    t = Tokens(zeros, zeros, zeros, advantages, np.zeros(7, dtype=np.int64))
    terms: LossTerms = LOSSES["dapo"](t.inputs(current), settings_of("dapo"))
    assert terms.is_clipped_N.tolist() == [True, False, False, True, False, False, True]
    terms.loss_N.sum().backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    assert current.grad is not None
    assert (current.grad == 0).tolist() == [True, False, False, True, False, True, True]
    assert float(terms.loss_N[-1].detach()) == pytest.approx(3.0), (
        "the dual clip bounds the loss of a token with a negative advantage"
    )


@pytest.mark.parametrize("kind", ["tis", "icepop", "mis"])
@pytest.mark.parametrize("level", ["token", "sequence_mean", "sequence_sum"])
@given(t=tokens())
@settings(max_examples=25)
def test_corrections_weight_tokens_by_old_over_sampled(kind: str, level: str, t: Tokens) -> None:
    bound, low = 1.7, 0.4
    found = correction(t.inputs(), torch.from_numpy(t.old), kind=kind, level=level, bound=bound, low=low)
    for n in range(len(t.row)):
        members = [m for m in range(len(t.row)) if t.row[m] == t.row[n]] if level != "token" else [n]
        product = math.prod(math.exp(t.old[m]) / math.exp(t.sampled[m]) for m in members)
        weight = product if level == "sequence_sum" else product ** (1 / len(members))
        if min(abs(weight - bound), abs(weight - 1 / bound), abs(weight - low)) < 1e-9:
            continue
        if kind == "tis":
            expected = weight if weight < bound else bound
        elif kind == "mis":
            expected = weight if low < weight < bound else 0.0
        else:
            expected = weight if 1 / bound < weight < bound else 0.0
        assert float(found.weights_N[n]) == pytest.approx(expected, rel=1e-9)
        assert bool(found.is_bounded_N[n]) == (expected != pytest.approx(weight, rel=1e-12))


@given(t=tokens())
@settings(max_examples=25)
def test_only_sequences_with_negative_advantage_that_became_unlikely_are_masked(t: Tokens) -> None:
    found = off_policy_mask(t.inputs(), bound=0.3).tolist()
    for n in range(len(t.row)):
        members = [m for m in range(len(t.row)) if t.row[m] == t.row[n]]
        distance = math.fsum(t.sampled[m] - t.current[m] for m in members) / len(members)
        if abs(distance - 0.3) > 1e-9:
            assert found[n] == (t.advantage[n] < 0 and distance > 0.3)


@pytest.mark.parametrize(
    ("estimator", "is_sampled_by_another", "is_right"),
    [("k2", False, True), ("k3_weighted", False, True), ("k3_weighted", True, True), ("k3", False, False)],
)
def test_the_expected_gradient_of_the_kl_penalty_is_that_of_the_divergence(
    estimator: str, is_sampled_by_another: bool, is_right: bool
) -> None:
    """Exact expectations over five tokens, against finite differences of KL(policy || reference)."""
    rng = np.random.default_rng(5)
    logits, reference, other = (torch.from_numpy(rng.normal(size=5)) for _ in range(3))
    reference_N, other_N = torch.log_softmax(reference, 0), torch.log_softmax(other, 0)

    def divergence(at: torch.Tensor) -> float:
        logprobs = torch.log_softmax(at, 0)
        return float((logprobs.exp() * (logprobs - reference_N)).sum())

    steps = 1e-6 * torch.eye(5, dtype=torch.float64)
    expected = [(divergence(logits + step) - divergence(logits - step)) / 2e-6 for step in steps]
    logits.requires_grad_()
    current_N = torch.log_softmax(logits, 0)
    sampled_N = other_N if is_sampled_by_another else current_N.detach()
    inputs = LossInputs(
        current_N=current_N,
        old_N=sampled_N,
        sampled_N=sampled_N,
        advantages_N=torch.zeros(5),
        row_of_N=torch.zeros(5, dtype=torch.int64),
        num_rows=1,
    )
    penalty_N = kl_penalty(inputs, reference_N, estimator=estimator)
    (sampled_N.exp() * penalty_N).sum().backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    assert logits.grad is not None
    assert np.allclose(logits.grad.numpy(), expected, atol=1e-8) == is_right


@given(t=tokens())
@settings(max_examples=25)
def test_the_kl_penalty_is_non_negative_and_has_a_gradient(t: Tokens) -> None:
    current = torch.from_numpy(t.current.copy()).requires_grad_()
    divergence = k3_divergence(current, torch.from_numpy(t.old))
    expected = [math.exp(o - c) - (o - c) - 1 for c, o in zip(t.current, t.old, strict=True)]
    np.testing.assert_allclose(divergence.detach().numpy(), expected, atol=1e-12)
    divergence.sum().backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    assert current.grad is not None
    slopes = [1 - math.exp(o - c) for c, o in zip(t.current, t.old, strict=True)]
    np.testing.assert_allclose(current.grad.numpy(), slopes, atol=1e-9)
