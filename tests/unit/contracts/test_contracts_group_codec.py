"""The group codec: encoding is exact, and payloads that are not groups are rejected."""

import dataclasses
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import ArrayLike

from rollbook.contracts.decoding import MAX_DEPTH
from rollbook.contracts.errors import RunError
from rollbook.contracts.group import PromptGroup, group_id
from rollbook.contracts.group_checks import (
    TrainingLimits,
    UnusableGroupError,
    facts_of,
    inspect_frame,
    read_usable,
)
from rollbook.contracts.group_codec import (
    FORMAT,
    RUN_FIELDS,
    RowFrame,
    decode_group,
    encode_group,
)
from rollbook.contracts.policy import SamplingParams, pack_routes, routes_dtype, unknown_choice, with_length
from rollbook.contracts.task import TaskId
from rollbook.contracts.trajectory import COLUMNS, Column, EndReason, Extent, RolloutSample, TokenRow, TurnMark
from tests.parts.ledger.frames import changed_frame
from tests.parts.ledger.groups import big_group, group_of, token_row

FRAMES = Path(__file__).parent / "frames"


def rich_group() -> PromptGroup:
    first, second = token_row([0, 3, -1]), token_row([2], prompt=5)
    scored = RolloutSample(
        sequences=(
            first.with_columns(weights=np.linspace(0, 1, len(first)), reference_logprobs=np.full(len(first), -0.3)),
            second,
        ),
        sampling=SamplingParams(max_tokens=7, temperature=0.7, top_p=0.9, top_k=5, stop_token_ids=(1, 2), seed=2**40),
        reward=0.1 + 0.2,
        finish_reason=EndReason.MAX_TURNS,
        solved=True,
        messages=({"role": "user", "content": "grüß\n"}, {"role": "tool", "calls": [{"a": None, "b": 1.5}]}),
        metrics={"wait": 1e-300, "nan": float("nan")},
        turns=(TurnMark(sequence=0, start=2, end=5, seconds=0.25), TurnMark(sequence=1, start=5, end=6)),
        facts={"environment": {"n": 2**53 + 1, "deep": [[], {}]}, "flag": False},
    )
    broken = RolloutSample(
        sequences=(token_row([]),), sampling=SamplingParams(), reward=None, invalid_cause="env: connection lost"
    )
    return PromptGroup(id=group_id(TaskId("t"), 3), task_id=TaskId("t"), draw=3, samples=(scored, broken))


def assert_same_row(left: TokenRow, right: TokenRow) -> None:
    assert left.columns.keys() == right.columns.keys()
    pairs = [(getattr(left, name), getattr(right, name)) for name in ("token_ids", "logprobs", "loss_mask", "versions")]
    for one, other in [*pairs, *((left.columns[name], right.columns[name]) for name in left.columns)]:
        assert one.shape == other.shape
        assert one.dtype == other.dtype
        assert one.tobytes() == other.tobytes()


def assert_same_group(group: PromptGroup, back: PromptGroup) -> None:
    for name in ("id", "task_id", "draw", "part", "baseline"):
        assert getattr(group, name) == getattr(back, name), name
    for one, other in zip(group.samples, back.samples, strict=True):
        for left, right in zip(one.sequences, other.sequences, strict=True):
            assert_same_row(left, right)
        names = ("sampling", "reward", "finish_reason", "invalid_cause", "solved", "messages", "turns", "facts")
        for name in (*names, "started_at", "ended_at"):
            assert getattr(one, name) == getattr(other, name), name


def test_an_encoded_group_is_decoded_exactly() -> None:
    group = rich_group()
    back = decode_group(encode_group(group).payload)
    assert_same_group(group, back)
    assert back.samples[0].metrics["wait"] == 1e-300
    assert np.isnan(back.samples[0].metrics["nan"])


def test_a_stored_frame_of_format_2_is_decoded_exactly() -> None:
    """The file was written when 2 was the newest format. Groups of old runs must stay readable: never write it again."""
    payload = (FRAMES / "format-2.bin").read_bytes()
    back = decode_group(payload)
    scored, broken = rich_group().samples
    first, second = scored.sequences
    expected = replace(
        rich_group(),
        samples=(
            replace(
                scored,
                sequences=(first, second.with_columns(advantages=np.full(len(second), -0.5))),
                started_at=1_700_000_000.25,
                ended_at=1_700_000_001.5,
            ),
            broken,
        ),
        part=2,
        baseline=(0.0, 1.0),
    )
    assert_same_group(expected, back)
    assert inspect_frame(payload, back.id) == facts_of(back)


EXTENTS = {
    "turn_rewards": Column(extent=Extent.TURN),
    "experts": Column(dtype="uint8", width=2, lowest=0, highest=63),
    "parent": Column(dtype="int64", extent=Extent.SEQUENCE, lowest=-1, highest=2**40),
}


def turned_group(**columns: ArrayLike) -> PromptGroup:
    """A group of one sample with two sequences of five and six tokens, and two turns in the second one."""
    sample = RolloutSample(
        sequences=(token_row([0, 0, 0]), token_row([0, 0, 0, 0]).with_columns(**columns)),
        sampling=SamplingParams(),
        reward=1.0,
        turns=(TurnMark(sequence=1, start=2, end=3), TurnMark(sequence=1, start=4, end=5)),
    )
    return PromptGroup(id=group_id(TaskId("t"), 0), task_id=TaskId("t"), draw=0, samples=(sample,))


def test_a_new_column_of_any_extent_needs_only_its_line_in_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, declared in EXTENTS.items():
        monkeypatch.setitem(COLUMNS, name, declared)
    group = turned_group(turn_rewards=[0.5, -1.0], experts=np.arange(12).reshape(6, 2), parent=[2**33])
    payload = encode_group(group).payload
    assert_same_group(group, decode_group(payload))
    assert inspect_frame(payload, group.id) == facts_of(group)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"turn_rewards": [0.5]}, r"turn_rewards must be float32 of shape \(2,\)"),
        ({"experts": np.zeros((6, 3))}, r"experts must be uint8 of shape \(6, 2\)"),
        ({"experts": np.full((6, 2), 64)}, "experts has 64 at position 0"),
        ({"parent": [1, 2]}, r"parent must be int64 of shape \(1,\)"),
        ({"colour": [1, 2]}, "no column 'colour'; a sequence may have weights, advantages"),
    ],
)
def test_a_column_that_does_not_fit_its_line_is_refused(
    monkeypatch: pytest.MonkeyPatch, columns: dict[str, ArrayLike], message: str
) -> None:
    for name, declared in EXTENTS.items():
        monkeypatch.setitem(COLUMNS, name, declared)
    with pytest.raises(ValueError, match=message):
        turned_group(**columns)


def test_a_frame_with_an_unknown_column_is_refused_with_the_format(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as newer:
        newer.setitem(COLUMNS, "parent", EXTENTS["parent"])
        payload = encode_group(turned_group(parent=[1])).payload
    expected = f"has the column 'parent', which is unknown here; frames of format {FORMAT} may have weights"
    with pytest.raises(RunError, match=expected):
        decode_group(payload)
    with pytest.raises(UnusableGroupError, match=expected):
        inspect_frame(payload, "t@0")


def taught_group(num_tokens: int, width: int) -> PromptGroup:
    rng = np.random.default_rng(0)
    mask = np.arange(num_tokens) >= num_tokens // 2
    row = TokenRow.of(
        token_ids=rng.integers(0, 150_000, num_tokens),
        logprobs=np.where(mask, -1.0, 0.0),
        loss_mask=mask,
        versions=np.where(mask, 0, -1),
        teacher_top_ids=np.where(mask[:, None], rng.integers(0, 150_000, (num_tokens, width)), -1),
        teacher_top_logprobs=np.where(mask[:, None], -rng.exponential(5.0, (num_tokens, width)), np.nan),
    )
    sample = RolloutSample(sequences=(row,), sampling=SamplingParams(), reward=1.0)
    return PromptGroup(id=group_id(TaskId("t"), 0), task_id=TaskId("t"), draw=0, samples=(sample,))


def test_likeliest_tokens_of_a_teacher_are_compressed_in_the_frame_and_come_back() -> None:
    group = taught_group(400, 20)
    payload = encode_group(group).payload
    assert_same_group(group, decode_group(payload))
    assert inspect_frame(payload, group.id) == facts_of(group)
    plain = len(encode_group(dataclasses.replace(group, samples=(without_columns(group.samples[0]),))).payload)
    assert len(payload) - plain < 5.5 * 200 * 20, (
        "six bytes without compression, and none for tokens that are not trained"
    )


def without_columns(sample: RolloutSample) -> RolloutSample:
    return dataclasses.replace(sample, sequences=tuple(dataclasses.replace(r, columns={}) for r in sample.sequences))


def test_damaged_or_swollen_compressed_columns_are_refused() -> None:
    column = COLUMNS["teacher_top_ids"]
    raw = column.encode(np.zeros((4, 2), dtype=np.int32))
    assert column.decode(raw, num_tokens=4).tolist() == [[0, 0]] * 4
    for bad in (
        raw[:-6],
        raw[:2] + b"y" + raw[3:],
        b"\0\0" + raw[2:],
        b"",
        column.encode(np.zeros((10**6, 2), np.int32)),
    ):
        with pytest.raises(ValueError, match="compressed column"):
            column.decode(bad, num_tokens=4)
    with pytest.raises(ValueError, match="teacher_top_ids and teacher_top_logprobs must have the same shape"):
        token_row([0, 0, 0]).with_columns(teacher_top_ids=np.zeros((5, 2)))


def test_logprobs_keep_every_bit_including_nan() -> None:
    row = TokenRow.of(
        token_ids=[1, 2, 3],
        logprobs=[0.0, -0.1, float("nan")],
        loss_mask=[False, True, True],
        versions=[-1, 0, 0],
    )
    sample = RolloutSample(sequences=(row,), sampling=SamplingParams(), reward=1.0)
    group = PromptGroup(id=group_id(TaskId("t"), 0), task_id=TaskId("t"), draw=0, samples=(sample,))
    assert_same_row(decode_group(encode_group(group).payload).samples[0].sequences[0], row)


def test_decoded_arrays_are_writable() -> None:
    row = decode_group(encode_group(group_of("a")).payload).samples[0].sequences[0]
    assert all(getattr(row, name).flags.writeable for name in ("token_ids", "logprobs", "loss_mask", "versions"))


def test_equal_groups_have_equal_bytes_and_digests() -> None:
    assert encode_group(rich_group()) == encode_group(rich_group())
    assert encode_group(group_of("a")).digest != encode_group(group_of("b")).digest


def test_numpy_values_and_mappings_are_encoded_as_plain_values() -> None:
    sample = RolloutSample(
        sequences=(token_row([0]),),
        sampling=SamplingParams(),
        reward=1.0,
        metrics={"a": np.float32(0.5)},  # type: ignore[dict-item]  # what environments do in practice
        facts={"n": np.int64(3), "m": MappingProxyType({"x": 1}), "v": np.array([1, 2])},
    )
    group = PromptGroup(id=group_id(TaskId("t"), 0), task_id=TaskId("t"), draw=0, samples=(sample,))
    back = decode_group(encode_group(group).payload).samples[0]
    assert back.metrics == {"a": 0.5}
    assert back.facts == {"n": 3, "m": {"x": 1}, "v": [1, 2]}


def test_a_value_that_cannot_be_encoded_is_named_with_its_group() -> None:
    sample = RolloutSample(sequences=(token_row([0]),), sampling=SamplingParams(), reward=1.0, facts={"what": object()})
    group = PromptGroup(id=group_id(TaskId("t"), 0), task_id=TaskId("t"), draw=0, samples=(sample,))
    with pytest.raises(RunError, match=r"t@0 cannot be encoded: a value of type object"):
        encode_group(group)


def test_bytes_that_are_not_a_group_are_rejected() -> None:
    with pytest.raises(RunError, match="cannot be decoded"):
        decode_group(b"\x93\x01\x02\x03")
    with pytest.raises(RunError, match="cannot be decoded"):
        decode_group(encode_group(group_of("a")).payload[:-10])


@pytest.mark.parametrize("more", [{}, {"an_added_field": 1}])
def test_a_frame_of_an_unknown_format_is_rejected_by_its_number(more: dict[str, int]) -> None:
    payload = changed_frame(group_of("a"), format=FORMAT + 1, **more)
    expected = f"has format {FORMAT + 1}; supported is {FORMAT}"
    with pytest.raises(RunError, match=expected):
        decode_group(payload)
    with pytest.raises(UnusableGroupError, match=expected):
        inspect_frame(payload, "a@0")


def runs(*triples: tuple[int, int, int]) -> bytes:
    return np.array(triples, dtype="<i4").tobytes()


def test_a_damaged_run_length_allocates_no_memory() -> None:
    row = RowFrame(token_ids=bytes(8), logprobs=bytes(8), runs=runs((2**31 - 1, -1, 0), (2**31 - 1, 0, 1)))
    with pytest.raises(ValueError, match="do not cover its 2 tokens"):
        row.to_contract()


def test_a_sequence_with_one_run_per_token_is_decoded_exactly() -> None:
    count = 64
    row = TokenRow.of(
        token_ids=range(count),
        logprobs=[-0.5] * count,
        loss_mask=[at % 2 == 1 for at in range(count)],
        versions=[at % 3 - 1 for at in range(count)],
    )
    frame = RowFrame.of(row)
    assert len(frame.runs) == 4 * RUN_FIELDS * count
    back = frame.to_contract()
    assert (back.versions == row.versions).all()
    assert (back.loss_mask == row.loss_mask).all()


def test_a_long_sequence_takes_about_eight_bytes_per_token() -> None:
    """Four bytes of a token id and four of a logprob; runs take almost nothing."""
    assert len(encode_group(big_group("b", samples=8, tokens=1024)).payload) < 8 * 1024 * 8 + 2_000


def test_a_bool_as_reward_or_metric_is_encoded_as_a_number() -> None:
    sample = RolloutSample(sequences=(token_row([0]),), sampling=SamplingParams(), reward=True, metrics={"won": True})
    group = PromptGroup(id=group_id(TaskId("t"), 0), task_id=TaskId("t"), draw=0, samples=(sample,))
    decoded = decode_group(encode_group(group).payload).samples[0]
    assert (decoded.reward, decoded.metrics) == (1.0, {"won": 1.0})


def nested(levels: int) -> Any:
    value: Any = "x"
    for _ in range(levels):
        value = [value]
    return value


def at_stack_depth(depth: int, call: Callable[[], str]) -> str:
    return call() if depth == 0 else at_stack_depth(depth - 1, call)


@pytest.mark.parametrize(
    ("levels", "is_usable"), [(MAX_DEPTH - 1, True), (MAX_DEPTH, False), (200, False), (600, False), (3_000, False)]
)
def test_the_depth_of_a_frame_is_judged_alike_at_every_depth_of_the_stack(levels: int, is_usable: bool) -> None:
    """Ledger, trainer, replay and audit call these functions at different depths."""
    group = group_of("t")
    value = b"\x91" * levels + b"\x01"  # lists with one item
    frame = msgspec.msgpack.decode(encode_group(group).payload)
    marker = b"\xc4\x04deep"
    frame["samples"][0]["facts"] = {"x": b"deep"}
    payload = msgspec.msgpack.encode(frame).replace(marker, value)

    def inspect() -> str:
        try:
            inspect_frame(payload, group.id)
        except UnusableGroupError as error:
            return "unusable" if "nested deeper than 64 levels" in str(error) else str(error)
        return "usable"

    def read() -> str:
        return "usable" if isinstance(read_usable(payload, group.id, TrainingLimits()), PromptGroup) else "unusable"

    verdicts = {at_stack_depth(depth, call) for depth in (0, 200, 400, 700) for call in (inspect, read)}
    assert verdicts == {"usable" if is_usable else "unusable"}


def test_what_a_policy_wrote_is_recorded_even_if_a_frame_cannot_hold_it() -> None:
    written = {"a": "\ud83d", "b": 2**70, "c": nested(500)}
    group = rich_group()
    scored = replace(group.samples[0], facts={"call": written}, messages=({"role": "assistant", "call": written},))
    changed = replace(group, samples=(scored, group.samples[1]))
    found = decode_group(encode_group(changed).payload).samples[0]
    assert found.reward == scored.reward
    assert found.facts["call"]["a"] == "\\ud83d"
    assert found.facts["call"]["b"] == str(2**70)
    assert found.messages is not None
    assert found.messages[0]["call"]["b"] == str(2**70)
    inspect_frame(encode_group(changed).payload, group.id)


@given(
    num_experts=st.sampled_from([4, 254, 300]),
    shape=st.tuples(st.integers(1, 20), st.integers(1, 5), st.integers(1, 4)),
    seed=st.integers(0, 99),
)
def test_routes_of_any_model_survive_a_frame(num_experts: int, shape: tuple[int, int, int], seed: int) -> None:
    dtype = routes_dtype(num_experts)
    routes = np.random.default_rng(seed).integers(0, num_experts, shape).astype(dtype)
    row = TokenRow.of(
        token_ids=np.arange(shape[0] + 1),
        logprobs=np.zeros(shape[0] + 1),
        loss_mask=np.arange(shape[0] + 1) > 0,
        versions=np.zeros(shape[0] + 1),
        routes=with_length(routes, shape[0] + 1),
    )
    task = TaskId("t")
    sample = RolloutSample(sequences=(row,), reward=1.0)
    group = PromptGroup(id=group_id(task, 0), task_id=task, draw=0, samples=(sample,))
    payload = encode_group(group).payload
    assert inspect_frame(payload, group.id) == facts_of(group)
    found = decode_group(payload).samples[0].sequences[0].routes
    assert found is not None
    assert found.dtype == dtype
    np.testing.assert_array_equal(found[:-1], routes)
    assert (found[-1] == unknown_choice(dtype)).all()


def test_sorted_routes_are_stored_in_two_thirds_of_their_bytes() -> None:
    # 128 experts, 8 chosen, in 48 layers: Qwen3-30B-A3B.
    scores = np.random.default_rng(0).random((200, 48, 128))
    routes = np.sort(np.argpartition(scores, 8, axis=-1)[..., :8], axis=-1).astype(np.uint8)
    assert routes.nbytes == 200 * 384
    assert 0.6 < len(pack_routes(routes)) / routes.nbytes < 0.68


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda raw: raw[:5], "no header"),
        (lambda raw: raw[:-3], "routes"),
        (lambda raw: raw[:9] + b"??" + raw[11:], "cannot be decompressed"),
        # A length that would allocate terabytes is compared with the number of tokens first.
        (lambda raw: raw[:5] + (2**32 - 1).to_bytes(4, "little") + raw[9:], "those of 4294967295 tokens, not of 6"),
        (lambda raw: raw[:1] + b"\xff\xff\xff\xff" + raw[5:], "routes of 65535 layers"),
    ],
)
def test_damaged_routes_are_refused_by_ledger_and_trainer(damage: Callable[[bytes], bytes], message: str) -> None:
    payload = encode_group(turned_group(routes=np.zeros((6, 2, 3), np.uint8))).payload
    frame = msgspec.msgpack.decode(payload)
    columns = frame["samples"][0]["columns"][1]
    columns["routes"] = damage(columns["routes"])
    broken = msgspec.msgpack.encode(frame)
    with pytest.raises(RunError, match=message):
        decode_group(broken)
    with pytest.raises(UnusableGroupError, match=message):
        inspect_frame(broken, "t@0")


def test_routes_must_cover_every_token() -> None:
    with pytest.raises(ValueError, match=r"routes must be uint8 or uint16 of shape \(6, layers, choices\)"):
        turned_group(routes=np.zeros((5, 2, 3), np.uint8))
