"""Encoding and decoding messages of the OpenEnv protocol."""

import pytest

from rollbook.contracts.task import Observation
from rollbook.envs.server.protocol import (
    EnvVerb,
    ErrorCode,
    ReplyKind,
    TextDialect,
    WireError,
    encode,
    episode_id_of,
    observation_of,
    read_reply,
    read_request,
    result_data,
)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("not json", ErrorCode.INVALID_JSON),
        (b"\xff\xfe", ErrorCode.INVALID_JSON),
        ("[]", ErrorCode.VALIDATION_ERROR),
        ("{}", ErrorCode.VALIDATION_ERROR),
        ('{"type": "step", "data": "7"}', ErrorCode.VALIDATION_ERROR),
        ('{"type": "dance"}', ErrorCode.UNKNOWN_TYPE),
    ],
)
def test_an_invalid_message_is_refused_with_the_error_code_of_the_protocol(text: str | bytes, code: ErrorCode) -> None:
    with pytest.raises(WireError) as refusal:
        read_request(text)
    assert refusal.value.code is code


def test_an_encoded_request_is_decoded_unchanged() -> None:
    request = read_request(encode(EnvVerb.STEP, {"action": "aws s3 ls", "metadata": {"turn": 1}}))
    assert (request.verb, TextDialect().action_of(request.data)) == (EnvVerb.STEP, "aws s3 ls")


@pytest.mark.parametrize("name", ["action", "command", "message", "text"])
def test_the_text_of_an_action_may_have_any_name(name: str) -> None:
    assert TextDialect().action_of({name: "7"}) == "7"


@pytest.mark.parametrize("data", [{}, {"a": "1", "b": "2"}, {"guess": 7}, {"metadata": {}}])
def test_an_action_without_exactly_one_text_is_refused(data: dict[str, object]) -> None:
    with pytest.raises(WireError, match="an object with one text"):
        TextDialect().action_of(data)


@pytest.mark.parametrize(
    ("data", "row"),
    [
        ({"task": {"secret": 1}}, {"secret": 1}),
        ({"task": {"secret": 1}, "seed": 4, "episode_id": "e"}, {"secret": 1, "seed": 4}),
        ({"task": {"secret": 1, "seed": 9}, "seed": 4}, {"secret": 1, "seed": 9}),
        ({"secret": 1, "seed": 4, "episode_id": "e"}, {"secret": 1, "seed": 4}),
        ({"task": "write a poem"}, {"task": "write a poem"}),
        ({}, {}),
    ],
)
def test_a_task_is_an_object_or_the_fields_themselves(data: dict[str, object], row: dict[str, object]) -> None:
    assert TextDialect().task_of(data) == row


def test_unknown_fields_next_to_a_task_are_refused() -> None:
    with pytest.raises(WireError, match="difficulty"):
        TextDialect().task_of({"task": {"secret": 1}, "difficulty": 3})


def test_an_episode_id_is_a_short_text() -> None:
    assert episode_id_of({"episode_id": "e7"}) == "e7"
    with pytest.raises(WireError, match="255"):
        episode_id_of({"episode_id": "x" * 256})


def test_facts_are_outside_the_observation_and_can_be_omitted() -> None:
    answer = Observation(text="higher", reward=0.5, done=True, solved=False, facts={"secret": 7})
    data = result_data(TextDialect(), answer, with_facts=True)
    assert data == {
        "observation": {"text": "higher", "solved": False},
        "reward": 0.5,
        "done": True,
        "metadata": {"secret": 7},
    }
    assert "metadata" not in result_data(TextDialect(), answer, with_facts=False)
    assert observation_of(data) == answer


def test_messages_before_the_text_and_the_last_action_are_sent() -> None:
    shown = Observation(text="2 + 3?", earlier=({"role": "system", "content": "Be brief."},), last_action="submit")
    assert observation_of(result_data(TextDialect(), shown, with_facts=True)) == shown
    other = {"observation": {"text": "a", "earlier": [1, {"role": 1, "content": "b"}]}, "reward": 0.0}
    assert observation_of(other).earlier == ()


def test_a_reward_that_is_not_finite_is_never_sent() -> None:
    with pytest.raises(WireError, match="finite"):
        result_data(TextDialect(), Observation(text="", reward=float("nan")), with_facts=True)


def test_an_observation_of_another_server_is_read_as_json_text() -> None:
    reply = read_reply(
        '{"type":"observation","data":{"observation":{"total":3,"metadata":{"k":1}},"reward":null,"done":false}}'
    )
    seen = observation_of(reply.data)
    assert reply.kind is ReplyKind.OBSERVATION
    assert (seen.text, seen.reward, seen.facts) == ('{"total": 3}', 0.0, {"k": 1, "observation": {"total": 3}})


@pytest.mark.parametrize("data", [{}, {"observation": 3, "reward": 1}, {"observation": {}, "reward": "much"}])
def test_an_observation_message_without_observation_or_with_a_wrong_reward_is_refused(data: dict[str, object]) -> None:
    with pytest.raises(WireError, match="observation"):
        observation_of(data)


def test_objects_without_a_json_form_are_sent_as_text_and_a_circle_is_refused() -> None:
    assert read_reply(encode(ReplyKind.STATE, {"when": complex(1, 2)})).data == {"when": "(1+2j)"}
    circle: dict[str, object] = {}
    circle |= {"one": circle, "other": [circle]}
    with pytest.raises(WireError, match="contains itself"):
        encode(ReplyKind.STATE, circle)


def test_what_a_policy_wrote_can_be_sent() -> None:
    deep: object = 1
    for _ in range(2_000):
        deep = {"a": [deep]}
    sent = {"text": "\ud800", "number": 2**80, "deep": deep}
    for received in (read_reply(encode(ReplyKind.STATE, sent)), read_request(encode(EnvVerb.STEP, sent))):
        assert received.data["text"] == "\\ud800"
        assert int(received.data["number"]) == 2**80
        assert isinstance(received.data["deep"]["a"][0]["a"], list)
