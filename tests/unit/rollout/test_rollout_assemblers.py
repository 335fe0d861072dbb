"""Assemblers: rows of turns, rejected turns and their errors."""

import pytest

from rollbook.contracts.policy import SamplingParams
from rollbook.contracts.trajectory import EndReason
from rollbook.rollout.assemblers.assembler import AssemblyError, PrefixMismatchError
from rollbook.rollout.assemblers.chat import MessageTrajectoryAssembler
from rollbook.rollout.assemblers.tokens import TrajectoryAssembler
from tests.parts.rollout.guessing import CHATML, REWRITING, completion, letter_tokenizer

SAMPLING = SamplingParams(temperature=0.9)


def linear(*prompt: int) -> TrajectoryAssembler:
    assembler = TrajectoryAssembler(SAMPLING)
    assembler.add_prompt(prompt)
    return assembler


def test_rows_and_turn_marks_follow_the_turns() -> None:
    assembler = linear(5, 6)
    assembler.add_completion(completion([7, 8], version=3), seconds=0.25)
    assembler.add_observation([9])
    assembler.add_completion(completion([10], version=4))
    sample = assembler.build(reward=1.0, solved=True, finish_reason=EndReason.MAX_TURNS, facts={"a": 1})
    row = sample.sequences[0]
    assert row.token_ids.tolist() == [5, 6, 7, 8, 9, 10]
    assert row.loss_mask.tolist() == [False, False, True, True, False, True]
    assert row.versions.tolist() == [-1, -1, 3, 3, -1, 4]
    assert row.logprobs.tolist() == [0, 0, -0.5, -0.5, 0, -0.5]
    assert [(t.start, t.end, t.seconds) for t in sample.turns] == [(2, 4, 0.25), (5, 6, 0.0)]
    assert (sample.sampling, sample.finish_reason, sample.solved) == (SAMPLING, EndReason.MAX_TURNS, True)


def test_an_episode_whose_last_answer_is_cut_is_truncated_unless_the_rollout_says_otherwise() -> None:
    assembler = linear(5, 6)
    assembler.add_completion(completion([7, 8], is_truncated=True))
    assert assembler.build(reward=1.0).finish_reason is EndReason.MAX_TOKENS
    assert assembler.build(reward=1.0, finish_reason=EndReason.DONE).finish_reason is EndReason.DONE
    assembler.add_completion(completion([9]))
    assert assembler.build(reward=1.0).finish_reason is EndReason.DONE, "only the last answer counts"


@pytest.mark.parametrize(
    ("sampled", "end"),
    [([7, 8], EndReason.DONE), ([7], EndReason.MAX_TOKENS)],
    ids=["max_tokens long", "cut by another limit"],
)
def test_an_answer_of_max_tokens_is_complete_if_actions_have_this_length_by_design(
    sampled: list[int], end: EndReason
) -> None:
    assembler = TrajectoryAssembler(SamplingParams(max_tokens=2, complete_at_max_tokens=True))
    assembler.add_turn([5, 6], completion(sampled, is_truncated=True))
    assert assembler.build(reward=1.0).finish_reason is end


def test_a_prompt_with_other_tokens_is_rejected_at_the_first_difference() -> None:
    assembler = linear(5, 6)
    assembler.add_completion(completion([7, 8]))
    assert assembler.expect_prefix([5, 6, 7, 8, 1, 2]) == [1, 2]
    with pytest.raises(PrefixMismatchError, match="token 78 instead of 7 at position 2") as raised:
        assembler.expect_prefix([5, 6, 78, 1, 2])
    assert raised.value.position == 2
    with pytest.raises(
        PrefixMismatchError, match="ends at position 3, but the sequence already has 4 tokens"
    ) as raised:
        assembler.expect_prefix([5, 6, 7])
    assert raised.value.position == 3


def test_calls_in_the_wrong_order_are_rejected() -> None:
    empty = TrajectoryAssembler(SAMPLING)
    with pytest.raises(AssemblyError, match="before add_prompt"):
        empty.add_completion(completion([1]))
    with pytest.raises(AssemblyError, match="before add_prompt"):
        empty.add_observation([1])
    with pytest.raises(AssemblyError, match="prompt is empty"):
        empty.add_prompt([])
    with pytest.raises(AssemblyError, match="nothing was assembled"):
        empty.build(reward=1.0)
    with pytest.raises(AssemblyError, match="after 1 tokens"):
        linear(1).add_prompt([2])
    with pytest.raises(AssemblyError, match="empty completion"):
        linear(1).add_completion(completion([]))
    with pytest.raises(AssemblyError, match="without a turn"):
        linear(1).build(reward=1.0)


def test_a_sample_cannot_mix_sampling_settings() -> None:
    assembler = linear(1)
    assembler.add_completion(completion([2]), sampling=SamplingParams(temperature=0.9, max_tokens=3))
    with pytest.raises(AssemblyError, match=r"temperature 0\.1, the others with 0\.9"):
        assembler.add_completion(completion([2]), sampling=SamplingParams(temperature=0.1))


def test_context_after_the_last_turn_is_left_out() -> None:
    assembler = linear(1)
    assembler.add_completion(completion([2]))
    assembler.add_observation([3, 4, 5])
    assert assembler.build(reward=0.0).sequences[0].token_ids.tolist() == [1, 2]


def test_an_unscorable_episode_keeps_its_tokens_and_its_cause() -> None:
    sample = linear(1, 2).build(reward=None, invalid_cause="env: connection lost")
    assert not sample.is_scorable
    assert sample.sequences[0].token_ids.tolist() == [1, 2]


def test_the_next_prompt_is_the_tokens_so_far_plus_the_rendered_suffix() -> None:
    tokenizer = letter_tokenizer()
    chat = MessageTrajectoryAssembler(tokenizer, SAMPLING)
    chat.add_message("user", "one")
    first = chat.next_prompt()
    sampled = [*tokenizer.encode("two"), *tokenizer.eos_token_ids]
    assert chat.add_completion(completion(sampled)) == "two"
    chat.add_message("user", "three")
    second = chat.next_prompt()
    assert second == first + sampled + tokenizer.encode("\n<|im_start|>user\nthree<|im_end|>\n<|im_start|>assistant\n")
    assert second == tokenizer.encode(tokenizer.render(chat.messages, add_generation_prompt=True))


def test_a_truncated_turn_is_closed_with_untrained_tokens() -> None:
    tokenizer = letter_tokenizer()
    chat = MessageTrajectoryAssembler(tokenizer, SAMPLING)
    chat.add_message("user", "one")
    chat.next_prompt()
    chat.add_completion(completion(tokenizer.encode("tw"), is_truncated=True))
    chat.add_message("user", "go on")
    chat.next_prompt()
    chat.add_completion(completion(tokenizer.encode("o")))
    row = chat.build(reward=1.0).sequences[0]
    assert tokenizer.decode(row.token_ids[row.loss_mask].tolist()) == "two"
    end = tokenizer.eos_token_ids[0]
    assert not row.loss_mask[row.token_ids == end].any()


@pytest.mark.parametrize("content", ["m.content | trim", "m.content.lstrip()", "' ' ~ m.content ~ ' '"])
def test_white_space_changed_by_the_template_is_not_a_rewrite(content: str) -> None:
    tokenizer = letter_tokenizer(CHATML.replace("{{ m.content }}", "{{ " + content + " }}"))
    chat = MessageTrajectoryAssembler(tokenizer, SAMPLING)
    chat.add_message("user", "one")
    first = chat.next_prompt()
    sampled = tokenizer.encode(" two \n<|im_end|>")
    chat.add_completion(completion(sampled))
    chat.add_message("user", "three")
    prompt = chat.next_prompt()
    assert prompt[: len(first) + len(sampled)] == first + sampled
    assert prompt.count(tokenizer.eos_token_ids[0]) == 3, "the sampled end token is not repeated"


def play_with_rewriting_template(chat: MessageTrajectoryAssembler) -> None:
    tokenizer = letter_tokenizer(REWRITING)
    for said in ("first", "second", "third"):
        chat.add_message("user", "hm")
        chat.next_prompt()
        chat.add_completion(completion(tokenizer.encode(f"{said}<|im_end|>")))


def test_a_template_that_rewrites_history_is_an_error_with_the_position() -> None:
    chat = MessageTrajectoryAssembler(letter_tokenizer(REWRITING), SAMPLING)
    with pytest.raises(
        PrefixMismatchError, match=r"before turn 2: at character \d+ it renders .*\.\.\..* where .*first"
    ) as raised:
        play_with_rewriting_template(chat)
    assert raised.value.position == len("<|im_start|>user\nhm<|im_end|>\n<|im_start|>assistant\n")


def test_with_fork_a_rewritten_history_starts_a_new_sequence_and_keeps_sampled_tokens() -> None:
    tokenizer = letter_tokenizer(REWRITING)
    chat = MessageTrajectoryAssembler(tokenizer, SAMPLING, on_rewrite="fork")
    play_with_rewriting_template(chat)
    chat.add_message("user", "one more")
    chat.next_prompt()  # without a completion: makes no sequence
    sample = chat.build(reward=0.5)
    assert [tokenizer.decode(row.token_ids[row.loss_mask].tolist()) for row in sample.sequences] == [
        "first",
        "second",
        "third",
    ]
    assert [turn.sequence for turn in sample.turns] == [0, 1, 2]
    last = tokenizer.decode(sample.sequences[2].token_ids.tolist())
    assert last == "user\nhm\nassistant\n...\nuser\nhm\nassistant\n...\nuser\nhm\nassistant\nthird"


def test_a_completion_without_next_prompt_is_rejected() -> None:
    chat = MessageTrajectoryAssembler(letter_tokenizer(), SAMPLING)
    with pytest.raises(AssemblyError, match="call next_prompt"):
        chat.add_completion(completion([5]))
    chat.add_message("user", "one")
    chat.next_prompt()
    chat.add_completion(completion([5]))
    with pytest.raises(AssemblyError, match="call next_prompt"):
        chat.add_completion(completion([5]))
    with pytest.raises(AssemblyError, match="without a message"):
        MessageTrajectoryAssembler(letter_tokenizer(), SAMPLING).next_prompt()
