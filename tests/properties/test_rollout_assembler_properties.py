"""A sample contains exactly the tokens that the engine consumed and produced, for any turns."""

from typing import Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollbook.contracts.policy import Completion, FinishReason, SamplingParams
from rollbook.rollout.assemblers.assembler import PrefixMismatchError
from rollbook.rollout.assemblers.chat import MessageTrajectoryAssembler
from rollbook.rollout.assemblers.tokens import BranchingAssembler, TrajectoryAssembler, build_assembler
from tests.parts.rollout.guessing import CHARACTERS, REWRITING, letter_tokenizer

TOKENIZERS = {"error": letter_tokenizer(), "fork": letter_tokenizer(REWRITING)}
IDS = st.lists(st.integers(0, 48), max_size=6)


@st.composite
def completions(draw: st.DrawFn) -> Completion:
    """Any completion, with special tokens anywhere and versions that change within it."""
    ids = draw(st.lists(st.integers(0, 48), min_size=1, max_size=6))
    versions = sorted(draw(st.lists(st.integers(0, 9), min_size=len(ids), max_size=len(ids))))
    return Completion(
        token_ids=np.array(ids, dtype=np.int32),
        logprobs=-np.arange(1, len(ids) + 1, dtype=np.float32),
        versions=np.array(versions, dtype=np.int32),
        finish_reason=FinishReason.STOP,
    )


@settings(max_examples=150)
@given(prompt=IDS.filter(bool), turns=st.lists(st.tuples(completions(), IDS), min_size=1, max_size=5))
def test_a_token_trajectory_has_exactly_the_consumed_and_produced_tokens(
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


@settings(max_examples=150)
@given(
    turns=st.lists(st.tuples(st.text(CHARACTERS, max_size=8), completions()), min_size=1, max_size=4),
    on_rewrite=st.sampled_from(["error", "fork"]),
)
def test_a_chat_trajectory_has_exactly_the_consumed_and_produced_tokens(
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


@st.composite
def rewritten_histories(draw: st.DrawFn) -> list[tuple[list[int], Completion]]:
    """Turns of an agent that continues an earlier turn, cuts its history or changes a token in it."""
    states: list[list[int]] = [draw(IDS.filter(bool))]
    turns: list[tuple[list[int], Completion]] = []
    for _ in range(draw(st.integers(1, 7))):
        prompt = list(draw(st.sampled_from(states)))
        if draw(st.booleans()):
            prompt = prompt[: draw(st.integers(1, len(prompt)))]
        if draw(st.booleans()):
            prompt[draw(st.integers(0, len(prompt) - 1))] = draw(st.integers(0, 3))
        prompt += draw(IDS)
        sampled = draw(completions())
        turns.append((prompt, sampled))
        states.append(prompt + sampled.token_ids.tolist())
    return turns


@settings(max_examples=80)
@given(turns=rewritten_histories(), name=st.sampled_from(["branching", "per_turn"]))
def test_for_any_rewritten_history_each_sampled_token_is_trained_once_after_its_exact_prompt(
    turns: list[tuple[list[int], Completion]], name: Literal["branching", "per_turn"]
) -> None:
    assembler = build_assembler(name, SamplingParams())
    marks = [assembler.add_turn(prompt, sampled) for prompt, sampled in turns]
    sample = assembler.build(reward=1.0)
    assert list(sample.turns) == marks
    trained = [np.zeros(len(row), dtype=np.int64) for row in sample.sequences]
    for turn, (prompt, sampled) in zip(marks, turns, strict=True):
        row = sample.sequences[turn.sequence]
        assert row.token_ids[: turn.start].tolist() == prompt
        assert np.array_equal(row.token_ids[turn.start : turn.end], sampled.token_ids)
        assert np.array_equal(row.logprobs[turn.start : turn.end], sampled.logprobs)
        assert np.array_equal(row.versions[turn.start : turn.end], sampled.versions)
        trained[turn.sequence][turn.start : turn.end] += 1
    for row, times in zip(sample.sequences, trained, strict=True):
        assert np.array_equal(times, row.loss_mask)  # once where it is trained, never elsewhere
        assert np.array_equal(row.loss_mask, row.versions != -1)
    assert assembler.num_forks == len(sample.sequences) - 1


@settings(max_examples=80)
@given(turns=rewritten_histories())
def test_linear_rejects_a_rewrite_at_its_first_difference_exactly_when_branching_forks(
    turns: list[tuple[list[int], Completion]],
) -> None:
    linear, branching = TrajectoryAssembler(SamplingParams()), BranchingAssembler(SamplingParams())
    for prompt, sampled in turns:
        so_far = linear.prompt_ids
        branching.add_turn(prompt, sampled)
        if branching.num_forks:
            with pytest.raises(PrefixMismatchError) as rejected:
                linear.add_turn(prompt, sampled)
            at = rejected.value.position
            assert prompt[:at] == so_far[:at]
            assert at == len(prompt) or prompt[at] != so_far[at]
            assert linear.prompt_ids == so_far, "a rejected turn changes nothing"
            return
        linear.add_turn(prompt, sampled)
    alone, branched = linear.build(reward=1.0), branching.build(reward=1.0)
    assert np.array_equal(alone.sequences[0].token_ids, branched.sequences[0].token_ids)
    assert np.array_equal(alone.sequences[0].loss_mask, branched.sequences[0].loss_mask)
