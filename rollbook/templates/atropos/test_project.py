"""Run with `pytest`. A wrong reward is the most common reason why training does not work, so test it first."""

from environment import question, score, scored_group


def test_the_right_word_earns_one() -> None:
    assert score(4, "even") == 1.0
    assert score(4, "It is even.") == 1.0
    assert score(4, "odd") == 0.0
    assert score(4, "") == 0.0
    assert question(4) == "Is 4 even or odd ?"


def test_a_group_has_one_mask_and_one_logprob_for_each_token() -> None:
    choice = {"token_ids": [9], "logprobs": {"content": [{"logprob": -0.5}]}, "message": {"content": "even"}}
    group = scored_group(4, {"prompt_token_ids": [1, 2], "choices": [choice, choice]})
    assert group == {
        "tokens": [[1, 2, 9], [1, 2, 9]],
        "masks": [[-100, -100, 9], [-100, -100, 9]],
        "inference_logprobs": [[1.0, 1.0, -0.5], [1.0, 1.0, -0.5]],
        "scores": [1.0, 1.0],
    }
