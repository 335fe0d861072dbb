"""Token-in, token-out: whatever is said, the record holds exactly what the engine consumed and produced."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from rollbook.contracts.policy import Completion, FinishReason, SamplingParams
from rollbook.rollout.assemblers.linear import TrajectoryAssembler
from rollbook.rollout.assemblers.messages import MessageTrajectoryAssembler
from tests.parts.rollout_world import CHARACTERS, FORGETFUL, letter_tokenizer

TOKENIZERS = {"error": letter_tokenizer(), "fork": letter_tokenizer(FORGETFUL)}
IDS = st.lists(st.integers(0, 48), max_size=6)


@st.composite
def completions(draw: st.DrawFn) -> Completion:
    """Anything an engine may sample, special tokens in odd places included, with versions that change on the way."""
    ids = draw(st.lists(st.integers(0, 48), min_size=1, max_size=6))
    versions = sorted(draw(st.lists(st.integers(0, 9), min_size=len(ids), max_size=len(ids))))
    return Completion(
        token_ids=np.array(ids, dtype=np.int32),
        logprobs=-np.arange(1, len(ids) + 1, dtype=np.float32),
        versions=np.array(versions, dtype=np.int32),
        finish_reason=FinishReason.STOP,
    )


@settings(max_examples=150, deadline=None)
@given(prompt=IDS.filter(bool), turns=st.lists(st.tuples(completions(), IDS), min_size=1, max_size=5))
def test_a_token_trajectory_holds_exactly_what_went_in_and_out(
    prompt: list[int], turns: list[tuple[Completion, list[int]]]
) -> None:
    assembler = TrajectoryAssembler(SamplingParams())
    assembler.add_prompt(prompt)
    consumed: list[list[int]] = []
    for sampled, observed in turns:
        consumed.append(assembler.prompt_ids)
        assembler.add_completion(sampled)
        assembler.add_observation(observed)
    sample = assembler.build(reward=1.0)
    row = sample.sequences[0]
    for turn, prompt_ids, (sampled, _) in zip(sample.turns, consumed, turns, strict=True):
        assert row.token_ids[: turn.start].tolist() == prompt_ids
        assert np.array_equal(row.token_ids[turn.start : turn.end], sampled.token_ids)
        assert np.array_equal(row.logprobs[turn.start : turn.end], sampled.logprobs)
        assert np.array_equal(row.versions[turn.start : turn.end], sampled.versions)
    assert row.num_trained == sum(len(sampled.token_ids) for sampled, _ in turns)
    assert np.array_equal(row.loss_mask, row.versions != -1)


@settings(max_examples=150, deadline=None)
@given(
    turns=st.lists(st.tuples(st.text(CHARACTERS, max_size=8), completions()), min_size=1, max_size=4),
    on_rewrite=st.sampled_from(["error", "fork"]),
)
def test_a_chat_trajectory_holds_exactly_what_the_engine_consumed_and_produced(
    turns: list[tuple[str, Completion]], on_rewrite: str
) -> None:
    chat = MessageTrajectoryAssembler(
        TOKENIZERS[on_rewrite], SamplingParams(), on_rewrite="fork" if on_rewrite == "fork" else "error"
    )
    consumed: list[list[int]] = []
    for said, sampled in turns:
        chat.add_message("user", said)
        consumed.append(chat.next_prompt())
        chat.add_completion(sampled)
    sample = chat.build(reward=1.0)
    for turn, prompt_ids, (_, sampled) in zip(sample.turns, consumed, turns, strict=True):
        row = sample.sequences[turn.sequence]
        assert row.token_ids[: turn.start].tolist() == prompt_ids
        assert np.array_equal(row.token_ids[turn.start : turn.end], sampled.token_ids)
        assert np.array_equal(row.versions[turn.start : turn.end], sampled.versions)
        assert row.loss_mask[turn.start : turn.end].all()
    assert sample.num_trained == sum(len(sampled.token_ids) for _, sampled in turns)
    if on_rewrite == "error":
        assert len(sample.sequences) == 1
