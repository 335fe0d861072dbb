"""The distribution a token is drawn from, and its reported logprob."""

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from rollbook.contracts.policy import SamplingParams
from rollbook.inference.engines.embedded.row_table import RowTable
from rollbook.inference.engines.embedded.sampling import RowSampling, sample
from rollbook.inference.request import GenerationRequest, seeded_uniforms

LOGITS = torch.tensor([2.0, 1.0, 0.0, -1.0])


def rows_of(samplings: Sequence[SamplingParams], uniforms: Sequence[float]) -> RowSampling:
    """The upper bits of the keys are the uniforms."""
    keys = [int(uniform * 2**53) << 11 for uniform in uniforms]
    return RowSampling(
        keys_N=torch.from_numpy(np.array(keys, dtype=np.uint64).view(np.int64)),
        temperatures_N=torch.tensor([s.temperature for s in samplings]),
        top_k_N=torch.tensor([s.top_k for s in samplings]),
        top_p_N=torch.tensor([s.top_p for s in samplings]),
        is_scaled=any(s.temperature not in (0, 1) for s in samplings),
        is_truncated=any(s.top_k > 0 or s.top_p < 1 for s in samplings),
        is_any_greedy=any(s.temperature == 0 for s in samplings),
    )


def drawn(
    logits_NV: torch.Tensor, samplings: Sequence[SamplingParams], uniforms: Sequence[float]
) -> tuple[list[int], list[float]]:
    tokens, logprobs = sample(logits_NV, rows_of(samplings, uniforms))
    return tokens.tolist(), logprobs.tolist()


def outcomes(sampling: SamplingParams, points: int = 2000) -> dict[int, tuple[float, float]]:
    """From token to (share of evenly spaced uniforms, reported logprob)."""
    uniforms = [(index + 0.5) / points for index in range(points)]
    tokens, logprobs = drawn(LOGITS.expand(points, 4), [sampling] * points, uniforms)
    reported = dict(zip(tokens, logprobs, strict=True))
    return {token: (tokens.count(token) / points, reported[token]) for token in reported}


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        (SamplingParams(), [0, 1, 2, 3]),
        (SamplingParams(temperature=0.5), [0, 1, 2, 3]),
        (SamplingParams(top_k=2), [0, 1]),
        (SamplingParams(top_k=9), [0, 1, 2, 3]),
        (SamplingParams(top_p=0.7), [0, 1]),
        (SamplingParams(top_p=1e-9), [0]),
        (SamplingParams(top_k=3, top_p=0.95, temperature=2.0), [0, 1, 2]),
    ],
)
def test_the_logprob_is_that_of_the_renormalised_distribution(sampling: SamplingParams, kept: list[int]) -> None:
    scaled = LOGITS / sampling.temperature
    expected = torch.full((4,), -math.inf)
    expected[kept] = scaled[kept]
    expected = expected.log_softmax(-1)
    found = outcomes(sampling)
    assert sorted(found) == kept
    for token, (share, logprob) in found.items():
        assert logprob == pytest.approx(float(expected[token]), abs=1e-5)
        assert share == pytest.approx(math.exp(logprob), abs=2e-3)


def test_rows_with_different_settings_do_not_affect_each_other() -> None:
    settings = [
        SamplingParams(),
        SamplingParams(top_k=1),
        SamplingParams(temperature=0),
        SamplingParams(temperature=3.0),
        SamplingParams(temperature=0, top_k=2),
    ]
    together = drawn(LOGITS.expand(5, 4), settings, [0.9] * 5)
    alone = [drawn(LOGITS.expand(1, 4), [setting], [0.9]) for setting in settings]
    assert together[0] == [tokens[0] for tokens, _ in alone]
    assert together[1] == pytest.approx([logprobs[0] for _, logprobs in alone], abs=1e-6)


def test_a_very_small_temperature_does_not_overflow() -> None:
    tokens, logprobs = drawn(torch.tensor([[900.0, -900.0]]), [SamplingParams(temperature=1e-30)], [0.999])
    assert tokens == [0]
    assert logprobs == [0.0]


def test_tokens_of_probability_zero_are_never_sampled() -> None:
    logits = torch.tensor([[-math.inf, 0.0, -math.inf, 0.0, -math.inf]])
    for uniform in (0.0, 0.49, 0.5, 1.0 - 2**-53):
        tokens, _ = drawn(logits, [SamplingParams()], [uniform])
        assert tokens[0] in (1, 3)


@pytest.mark.parametrize(
    "sampling", [SamplingParams(), SamplingParams(temperature=0), SamplingParams(top_k=2, top_p=0.5)]
)
def test_a_row_of_nan_has_a_nan_logprob_and_does_not_affect_other_rows(sampling: SamplingParams) -> None:
    logits = torch.stack([LOGITS, torch.tensor([1.0, math.nan, 0.0, 0.0])])
    _, logprobs = drawn(logits, [sampling] * 2, [0.1, 0.1])
    assert math.isfinite(logprobs[0])
    assert math.isnan(logprobs[1])


def test_the_keys_of_a_row_are_the_uniforms_of_its_seed_and_count() -> None:
    table = RowTable(4)
    for row, seed in enumerate([0, 7, 2**64 - 1]):
        request = GenerationRequest([1], SamplingParams(), limit=9, future=None)  # type: ignore[arg-type]
        request.seed = seed
        table.occupy(row, request)
        table.counts[row] = row * 5
    table.prepare()
    uniforms = (table.keys.view(np.uint64) >> np.uint64(11)) / 2**53
    for row, seed in enumerate([0, 7, 2**64 - 1]):
        assert uniforms[row] == seeded_uniforms([seed], [1], start=row * 5)[0]
