"""What crosses the wire, both ways, and what is refused."""

import pickle

import msgspec
import numpy as np
import pytest

from rollbook.contracts.errors import EpisodeError, FencedError, RunError, TransientError
from rollbook.contracts.policy import Completion, FinishReason
from rollbook.inference.connection import error_of
from rollbook.inference.request import BadRequestError, seeded_uniform
from rollbook.inference.server.generation import Generated
from rollbook.inference.server.routes.completions import choice_of
from rollbook.inference.wire.completions import Choice, CompletionBody, VersionSpan, spans, stamps
from rollbook.inference.wire.weights import WeightInfo
from tests.parts.inference.models import publication


def test_a_completion_survives_the_wire_to_the_last_bit() -> None:
    completion = Completion(
        token_ids=np.array([5, 0, 7], np.int32),
        logprobs=np.array([-0.1, -1e-7, -33.3], np.float32),
        versions=np.array([4, 4, 6], np.int32),
        finish_reason=FinishReason.ABORT,
    )
    asked = CompletionBody(prompt=[1], return_token_ids=True, logprobs=0)
    sent = msgspec.json.encode(choice_of(Generated(completion=completion, text=""), 0, asked, None))
    got = msgspec.json.decode(sent, type=Choice).to_contract()
    assert got.token_ids.tolist() == [5, 0, 7]
    assert got.logprobs.tobytes() == completion.logprobs.tobytes()
    assert got.versions.tolist() == [4, 4, 6]
    assert got.finish_reason is FinishReason.ABORT


def test_spans_join_equal_stamps_and_come_apart_again() -> None:
    found = spans([3, 3, 5, 5, 5, 6])
    assert [(span.version, span.start, span.end) for span in found] == [(3, 0, 2), (5, 2, 5), (6, 5, 6)]
    assert stamps(found, 6).tolist() == [3, 3, 5, 5, 5, 6]
    assert spans([]) == []


@pytest.mark.parametrize(
    "broken",
    [
        [VersionSpan(1, 0, 2)],
        [VersionSpan(1, 0, 2), VersionSpan(1, 1, 3)],
        [VersionSpan(1, 0, 4)],
        [VersionSpan(1, 1, 3)],
        [VersionSpan(1, 0, 0), VersionSpan(1, 0, 3)],
    ],
)
def test_spans_that_do_not_cover_the_tokens_are_refused(broken: list[VersionSpan]) -> None:
    with pytest.raises(ValueError, match="token"):
        stamps(broken, 3)


def test_versions_may_be_spelled_as_text() -> None:
    assert stamps([VersionSpan("7", 0, 2)], 2).tolist() == [7, 7]


def test_weight_info_names_unpublished_weights_as_vllm_does() -> None:
    assert WeightInfo.of(None).weight_version == "default"
    assert WeightInfo.of(None).to_contract() is None
    assert WeightInfo.of(publication(3, "d")).to_contract() == publication(3, "d")


def test_a_prompt_is_text_or_ids_or_lists_of_them_and_no_mixture() -> None:
    assert CompletionBody(prompt=[1, 2]).prompts() == [[1, 2]]
    assert CompletionBody(prompt=[[1], [2, 3]]).prompts() == [[1], [2, 3]]
    assert CompletionBody(prompt="text").prompts() == ["text"]
    assert CompletionBody(prompt=["a", "b"]).prompts() == ["a", "b"]
    for prompt in ([], [1, [2]], ["a", 1]):
        with pytest.raises(ValueError, match="prompt"):
            CompletionBody(prompt=prompt).prompts()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("status", "kind", "expected"),
    [
        (503, "stale_weights", TransientError),
        (500, "unknown", TransientError),
        (429, "busy", TransientError),
        (500, "generation_failed", EpisodeError),
        (400, "BadRequestError", EpisodeError),
        (409, "outdated_update", FencedError),
        (404, "HTTPNotFound", RunError),
    ],
)
def test_the_status_decides_who_must_act(status: int, kind: str, expected: type[Exception]) -> None:
    body = msgspec.json.encode({"error": {"message": "m", "type": kind, "code": status}})
    error = error_of(status, body, "0.25", where="http://there")
    assert isinstance(error, expected)
    assert "http://there" in str(error)
    if isinstance(error, TransientError):
        assert error.retry_after_s == 0.25


def test_an_error_that_is_not_json_is_quoted() -> None:
    assert "bad gateway" in str(error_of(502, b"<html>bad gateway", "soon", where="x"))


def test_errors_cross_process_edges() -> None:
    error = pickle.loads(pickle.dumps(BadRequestError("too long", param="prompt")))
    assert (str(error), error.param) == ("too long", "prompt")


def test_seeded_uniforms_are_spread_and_differ_by_seed_and_position() -> None:
    drawn = [seeded_uniform(seed, at) for seed in range(40) for at in range(50)]
    assert len(set(drawn)) == len(drawn)
    assert all(0 <= value < 1 for value in drawn)
    assert np.histogram(drawn, bins=10, range=(0, 1))[0].min() > 140
