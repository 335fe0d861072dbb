"""Values of states, evaluation of checks and answers, seeded faults, and the task bank."""

from typing import Any

import pytest

from rollbook.contracts.errors import RunError
from rollbook.envs.builtin.awscli.cloud.worker import ApiAnswer
from rollbook.envs.builtin.awscli.config import AwsCliConfig
from rollbook.envs.builtin.awscli.tasks.checks import (
    CheckResults,
    GradingRule,
    fill,
    hint_factor,
    hint_text,
    holds,
    is_right,
    potential,
    start_problem,
)
from rollbook.envs.builtin.awscli.tasks.setup import (
    MAX_FAULTS,
    Chaos,
    FaultKind,
    chosen_drift,
    chosen_variant,
    kept_values,
)
from rollbook.envs.builtin.awscli.tasks.task_bank import (
    AwsTask,
    Check,
    Split,
    TaskStep,
    TaskTier,
    aws_tasks,
    parse_task,
    task_bank,
)
from tests.parts.envs.aws import bucket_task

RULE = GradingRule(partial=0.5, hint_price=0.85)
START = CheckResults(goals=(False, False), keeps=(True,))


def test_the_initial_state_has_value_zero() -> None:
    assert RULE.value(START, start=START, hints_used=0) == 0.0


def test_half_of_the_goals_earn_half_of_the_partial_credit() -> None:
    assert RULE.value(CheckResults(goals=(True, False), keeps=(True,)), start=START, hints_used=0) == 0.25


def test_a_solved_state_has_value_one_times_the_price_of_each_hint() -> None:
    solved = CheckResults(goals=(True, True), keeps=(True,))
    assert [RULE.value(solved, start=START, hints_used=n) for n in range(3)] == pytest.approx([1.0, 0.85, 0.7225])


def test_a_broken_keep_check_gives_value_zero_even_if_every_goal_holds() -> None:
    broken = CheckResults(goals=(True, True), keeps=(False,))
    assert not broken.is_solved
    assert RULE.value(broken, start=START, hints_used=0) == 0.0


def test_goals_that_held_at_the_start_earn_nothing() -> None:
    start = CheckResults(goals=(True, False))
    assert potential(start, start=start) == 0.0
    assert potential(CheckResults(goals=(False, True)), start=start) == 0.0
    assert potential(CheckResults(goals=(True, True)), start=start) == 1.0


def test_a_goal_of_absence_earns_nothing_until_all_other_goals_hold() -> None:
    start = CheckResults(goals=(False, False, False), absences=frozenset({1, 2}))
    deleted = CheckResults(goals=(False, True, True), absences=frozenset({1, 2}))
    assert potential(deleted, start=start) == 0.0
    assert potential(CheckResults(goals=(True, True, False), absences=frozenset({1, 2})), start=start) == pytest.approx(
        2 / 3
    )


@pytest.mark.parametrize("expectation", [{"absent": True}, {"count": 0}])
def test_a_task_that_an_empty_account_would_solve_is_refused(expectation: dict[str, Any]) -> None:
    gone = {"says": "it is gone", "call": "s3.list_buckets", "query": "Buckets[?Name=='x']", **expectation}
    with pytest.raises(RunError, match=r"'it is gone' holds even in an empty account: add `keeps`"):
        parse_task(bucket_task(checks=[gone]), where="row")


def test_an_unsolved_state_has_less_value_than_a_solution_with_every_hint() -> None:
    assert RULE.partial < hint_factor(3, RULE.hint_price)


def test_a_start_that_is_solved_is_refused() -> None:
    flaw = start_problem(CheckResults(goals=(True,)), ["x"], [], must_be_open=[False])
    assert flaw is not None
    assert "solved before" in flaw


def test_a_fault_without_effect_is_refused() -> None:
    flaw = start_problem(CheckResults(goals=(False, True)), ["a", "b"], [], must_be_open=[True, True])
    assert flaw is not None
    assert "still true that b" in flaw


def test_keep_checks_must_hold_at_the_start() -> None:
    flaw = start_problem(CheckResults(goals=(False,), keeps=(False,)), ["a"], ["the crown"], must_be_open=[False])
    assert flaw is not None
    assert "the crown" in flaw


def check(**expectation: Any) -> Check:
    return Check.model_validate({"says": "x", "call": "s3.list_buckets", "query": "v", **expectation})


@pytest.mark.parametrize(
    ("expectation", "value", "is_true"),
    [
        ({"equals": "a"}, "a", True),
        ({"equals": "a"}, "b", False),
        ({"equals": 5}, "5", True),
        ({"equals": "80"}, 80.0, True),
        ({"equals": True}, "true", True),
        ({"equals": ["a", 3]}, ["a", "3"], True),
        ({"equals": ["a"]}, ["a", "b"], False),
        ({"contains": "a"}, ["b", "a"], True),
        ({"contains": {"Key": "k"}}, [{"Key": "k", "Value": "v"}], True),
        ({"contains": {"Key": "z"}}, [{"Key": "k"}], False),
        ({"contains": "bc"}, "abcd", True),
        ({"count": 2}, [1, 2], True),
        ({"count": 0}, None, True),
        ({"matches": "^a+$$"}, "aaa", True),
        ({"matches": "^a+$$"}, "aab", False),
        ({"absent": True}, None, True),
        ({"absent": True}, [], True),
        ({"absent": True}, ["x"], False),
        ({}, "something", True),
        ({}, [], False),
        ({}, None, False),
    ],
)
def test_a_check_compares_the_value_with_its_expectation(
    expectation: dict[str, Any], value: Any, is_true: bool
) -> None:
    assert holds(check(**expectation), ApiAnswer(result={"v": value}), {}) is is_true


def test_an_error_code_of_the_api_is_an_answer() -> None:
    gone = ApiAnswer(code="NoSuchBucket", message="no")
    assert not holds(check(equals="a"), gone, {})
    assert holds(check(absent=True), gone, {})


def test_json_inside_a_string_can_be_queried() -> None:
    question = check(parse="Statement[0].Effect", equals="Allow")
    assert holds(question, ApiAnswer(result={"v": '{"Statement":[{"Effect":"Allow"}]}'}), {})
    assert not holds(question, ApiAnswer(result={"v": "no json"}), {})


def test_a_check_with_two_expectations_is_refused() -> None:
    with pytest.raises(ValueError, match="one expectation each"):
        check(equals=1, count=2)


@pytest.mark.parametrize(
    ("truth", "reply", "is_true"),
    [("media-1", "media-1", True), ("media-1", '"Media-1".', True), (3, "3", True), (80.0, "80", True), ("a", "b", False),
     (["b", "a"], "a, b", True), (["a"], "a b", False),
     (80.0, "80.0", True), (80.0, "80.5", False), (3, "three", False), ("80", "80.0", False), ("a.b.", "a.b.", True)],
)  # fmt: skip
def test_an_answer_is_compared_with_the_truth(truth: Any, reply: str, is_true: bool) -> None:
    assert is_right(truth, reply) is is_true


def test_an_unknown_variable_is_reported_and_a_dollar_sign_stays() -> None:
    assert fill({"a": ["${x}", "$.y"]}, {"x": "1"}) == {"a": ["1", "$.y"]}
    with pytest.raises(ValueError, match=r"\$\{z\}"):
        fill("${z}", {"x": "1"})


def test_a_kept_value_must_exist_in_the_output() -> None:
    step = TaskStep(run="aws x", keep={"id": "Vpc.VpcId"})
    assert kept_values(step, '{"Vpc": {"VpcId": "v-1"}}', {}) == {"id": "v-1"}
    with pytest.raises(ValueError, match="printed nothing"):
        kept_values(step, "{}", {})
    with pytest.raises(ValueError, match="no JSON"):
        kept_values(step, "oops", {})


def drifting_task() -> AwsTask:
    return next(task for task in task_bank().values() if len(task.drift) >= 4)


def test_the_same_seed_gives_the_same_names_and_faults_and_seeds_differ() -> None:
    task = drifting_task()
    for seed in range(20):
        assert chosen_variant(task, seed) == chosen_variant(task, seed)
        names = [fault.name for fault in chosen_drift(task, seed)]
        assert names == [fault.name for fault in chosen_drift(task, seed)]
        assert task.drift_count[0] <= len(set(names)) == len(names) <= task.drift_count[1]
    assert len({tuple(f.name for f in chosen_drift(task, seed)) for seed in range(20)}) > 3
    assert len({tuple(chosen_variant(task, seed).values()) for seed in range(20)}) == len(task.variants)


def strikes(seed: int, scale: float) -> list[FaultKind | None]:
    task = next(task for task in task_bank().values() if task.chaos and task.tier is TaskTier.ADVANCED)
    chaos = Chaos(task, seed=seed, scale=scale)
    return [fault.kind if (fault := chaos.draw(is_last_move=move == 9)) else None for move in range(10)]


def test_chaos_is_reproducible_bounded_and_off_by_default() -> None:
    assert strikes(1, 0.0) == [None] * 10
    for seed in range(30):
        struck = strikes(seed, 5.0)
        assert struck == strikes(seed, 5.0)
        assert sum(kind is not None for kind in struck) <= MAX_FAULTS
        assert struck[9] is None
    kinds = {kind for seed in range(30) for kind in strikes(seed, 5.0)}
    assert kinds == {None, FaultKind.REFUSED, FaultKind.UNDONE}


def test_hints_are_given_in_order_with_their_price() -> None:
    assert hint_text(["a", "b", "c"], 0, 0.85).endswith(": a")
    assert "0.614" in hint_text(["a", "b", "c"], 2, 0.85)
    assert hint_text(["a", "b", "c"], 3, 0.85) == "there are no more hints"


def test_the_bank_has_the_documented_size_and_services() -> None:
    bank = task_bank()
    assert len(bank) >= 120
    assert len({service for task in bank.values() for service in task.services}) >= 15
    assert {task.tier for task in bank.values()} == set(TaskTier)
    assert all(len(set(task.hints)) == 3 for task in bank.values())


def test_every_tier_is_in_every_split_and_no_task_in_two() -> None:
    rows = {split: aws_tasks(split=split) for split in Split}
    ids = [row["id"] for split in Split for row in rows[split]]
    assert sorted(ids) == sorted(task_bank())
    assert all({row["tier"] for row in rows[split]} == {tier.value for tier in TaskTier} for split in Split)
    assert len(rows[Split.TRAIN]) > len(rows[Split.TEST]) + len(rows[Split.VALIDATION])


def test_adding_tasks_does_not_change_the_split_of_others() -> None:
    task = parse_task(bucket_task(id="s3-create-bucket"), where="test")
    assert task.split is task_bank()["s3-create-bucket"].split


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hints": ["one"]}, "hints"),
        ({"checks": []}, "nothing to grade"),
        ({"tier": "hard"}, "tier"),
        ({"colour": "red"}, "colour"),
        ({"variants": [{"a": 1}, {"b": 2}]}, "same variables"),
        ({"answer": {"call": "s3.list_buckets"}}, "not both"),
    ],
)
def test_a_wrong_task_is_refused_with_its_field(change: dict[str, Any], message: str) -> None:
    with pytest.raises(RunError, match=message):
        parse_task(bucket_task(**change), where="test")


def test_arguments_take_precedence_over_environment_variables() -> None:
    environ = {"AWS_RL_ENV_POOL_SIZE": "4", "AWS_RL_ENV_MINISTACK_BASE_PORT": "5000", "BACKEND_TYPE": "simulator"}
    config = AwsCliConfig.read({"base_port": 6000}, environ=environ)
    assert (config.pool_size, config.base_port, config.backend) == (4, 6000, "simulator")
    assert AwsCliConfig.read({}, environ=environ, size=2).pool_size == 2


def test_a_wrong_environment_variable_is_named() -> None:
    with pytest.raises(RunError, match=r"pool_size \(from AWS_RL_ENV_POOL_SIZE\)"):
        AwsCliConfig.read({}, environ={"AWS_RL_ENV_POOL_SIZE": "many"})


def test_a_real_account_must_be_confirmed_and_has_one_session() -> None:
    with pytest.raises(RunError, match="confirm_account"):
        AwsCliConfig.read({}, environ={"BACKEND_TYPE": "aws"})
    with pytest.raises(RunError, match="uses one account"):
        AwsCliConfig.read({"backend": "aws", "confirm_account": "1" * 12, "pool_size": 8}, environ={})


def test_a_check_of_a_field_that_the_agent_removed_does_not_hold() -> None:
    question = check(query="sort(Names)", equals=["a"])
    assert not holds(question, ApiAnswer(result={}), {})
    assert holds(question, ApiAnswer(result={"Names": ["a"]}), {})
