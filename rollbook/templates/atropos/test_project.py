"""Run with `pytest`. A wrong reward is the most common reason why training does not work, so test it first."""

from environment import HELD_OUT, TRAINED, question, score, scored_group


def test_the_right_word_earns_one() -> None:
    assert score(4, "even") == 1.0
    assert score(4, "It is even.") == 1.0
    assert score(4, "odd") == 0.0
    assert score(4, "") == 0.0
    assert question(34) == "Is 3 4 even or odd ?"


def test_held_out_numbers_are_not_trained() -> None:
    assert len(HELD_OUT) == 14
    assert sorted([*HELD_OUT, *TRAINED]) == list(range(100))


def test_a_group_has_one_mask_and_one_logprob_for_each_token() -> None:
    choice = {"token_ids": [9], "logprobs": {"content": [{"logprob": -0.5}]}, "message": {"content": "even"}}
    group = scored_group(4, {"prompt_token_ids": [1, 2], "choices": [choice, choice]})
    assert group == {
        "tokens": [[1, 2, 9], [1, 2, 9]],
        "masks": [[-100, -100, 9], [-100, -100, 9]],
        "inference_logprobs": [[1.0, 1.0, -0.5], [1.0, 1.0, -0.5]],
        "scores": [1.0, 1.0],
    }
