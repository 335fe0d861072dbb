"""Problems of reasoning-gym with its scorers. Needs the package."""

import pytest

pytest.importorskip("reasoning_gym")

from rollbook.envs.builtin.reasoning_gym_maths import ReasoningGymMaths, reasoning_gym_tasks


@pytest.mark.parametrize("dataset", ["basic_arithmetic", "leg_counting", "simple_equations"])
def test_the_answers_of_the_dataset_are_right_and_a_wrong_one_earns_almost_nothing(dataset: str) -> None:
    for row in reasoning_gym_tasks(dataset, 3, seed=1):
        env = ReasoningGymMaths(max_turns=2)
        env.reset(row)
        assert env.step(f"\\boxed{{{row['answer']}}}").reward == 1.0
        env.reset(row)
        env.step("\\boxed{123456789}")
        last = env.step("\\boxed{123456789}")
        assert (last.solved, last.reward < 0.1) == (False, True)


def test_a_row_without_a_dataset_is_refused() -> None:
    env = ReasoningGymMaths()
    env.reset({"question": "1+1", "answer": "2"})
    with pytest.raises(ValueError, match="source_dataset"):
        env.step("2")
