"""Run with `pytest`. A wrong reward is the most common reason why training does not work, so test it first."""

from rewards import correct
from tasks import tasks

from rollbook import RewardCase


def case(response: str, answer: int = 7) -> RewardCase:
    return RewardCase(row={"answer": answer}, response=response)


def test_the_right_answer_earns_one_and_others_nothing() -> None:
    assert correct(case("7")) == 1.0
    assert correct(case("The larger number is 7 .")) == 1.0
    assert correct(case("3")) == 0.0
    assert correct(case("")) == 0.0


def test_tasks_have_unique_ids_and_right_answers() -> None:
    rows = list(tasks())
    assert len({row["id"] for row in rows}) == len(rows) == 90
    assert sum(row["split"] == "test" for row in rows) == 12
    assert all(str(row["answer"]) in row["question"] for row in rows)
