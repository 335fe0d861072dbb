"""A run that stops learning says so once, with the setting that helps."""

import dataclasses
import io
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from rollbook.dashboard.learning_problems import WINDOW, LearningMonitor, ProblemKind, learning_problems
from rollbook.dashboard.run_files import RunReader, summarise
from rollbook.dashboard.run_metrics import RunMetrics, StepMetrics
from rollbook.dashboard.terminal import ProgressRenderer, open_view
from tests.parts.dashboard.run_dir import append_rows, trainer_row

HEALTHY = StepMetrics(
    step=0,
    time=0.0,
    reward=0.4,
    solved=0.4,
    entropy=1.0,
    ratio=1.0,
    ess=0.98,
    response_tokens=50,
    truncated=0.1,
    filtered=0.3,
)


def run(**changes: float) -> list[StepMetrics]:
    """A healthy run whose metrics change to other values in its second half. Its rewards are never exactly equal."""
    steps = 4 * WINDOW
    healthy = [dataclasses.replace(HEALTHY, step=n, reward=0.4 + n / 10_000) for n in range(1, steps + 1)]
    return [
        *healthy[: steps // 2],
        *(dataclasses.replace(step, **changes) for step in healthy[steps // 2 :]),  # type: ignore[arg-type]  # all are floats
    ]


def test_a_step_that_did_not_fit_in_memory_is_reported_at_once_with_the_passes_that_fit() -> None:
    failed = dataclasses.replace(HEALTHY, step=2, failed_pass_tokens=16384, pass_tokens=8192, is_checkpointing=True)
    found = learning_problems([dataclasses.replace(HEALTHY, step=1), failed, dataclasses.replace(failed, step=3)])
    assert [str(problem) for problem in found] == [
        "out of memory at step 2: the step did not fit in memory with passes of 16384 tokens; trained with 8192 and checkpointing."
        " To begin with passes that fit, set trainer.max_tokens_per_microbatch = 8192 and trainer.gradient_checkpointing = true, or"
        " give a policy server on the same GPU less (inference.kv_memory_mb)"
    ]


def test_a_run_without_a_step_says_that_its_groups_are_filtered(tmp_path: Path) -> None:
    played = {"process": "rollout", "rollout/episodes": 80, "rollout/raw_reward": 0.0}
    append_rows(tmp_path / "metrics.jsonl", {**played, "rollout/groups_finished": 19, "async/filter_drops": 19})
    reader = RunReader(tmp_path)
    assert reader.poll().problems == ()
    append_rows(tmp_path / "metrics.jsonl", {**played, "rollout/groups_finished": 1, "async/filter_drops": 3})
    [problem] = reader.poll().problems
    assert problem.startswith("filtered groups at step 0: 22 of 22 groups were filtered")
    assert "the mean reward of their samples is 0. Too hard" in problem
    assert reader.poll().problems == (problem,)
    assert summarise(tmp_path).problems == (problem,)


def test_filtered_groups_after_a_step_are_not_reported_as_nothing_to_train(tmp_path: Path) -> None:
    filtered = {"process": "rollout", "rollout/groups_finished": 40, "async/filter_drops": 40}
    append_rows(tmp_path / "metrics.jsonl", trainer_row(1), filtered)
    assert RunReader(tmp_path).poll().problems == summarise(tmp_path).problems == ()


@pytest.mark.parametrize(
    ("changes", "kind", "setting"),
    [
        ({"entropy": 0.02}, ProblemKind.ENTROPY, "trainer.entropy_bonus"),
        ({"filtered": 0.97}, ProblemKind.VARIANCE, "rollout.completions_per_prompt"),
        ({"ratio": 3.0}, ProblemKind.RATIO, "trainer.lr"),
        ({"ratio": 0.3}, ProblemKind.RATIO, "gate.max_head_offpolicy_versions"),
        ({"mismatch_weight": 3.0}, ProblemKind.RATIO, "trainer.correction"),
        ({"ess": 0.05}, ProblemKind.RATIO, "trainer.correction"),
        ({"response_tokens": 400.0, "truncated": 0.8}, ProblemKind.LENGTH, "trainer.overlong_tokens"),
        ({"cut": 0.3}, ProblemKind.CUT, "rollout.sampling.max_tokens"),
        ({"masked": 0.09, "masked_first": 0.3}, ProblemKind.MASKED, "gate.max_head_offpolicy_versions"),
        ({"masked": 0.02, "masked_first_turns": 0.2}, ProblemKind.MASKED, "gate.max_head_offpolicy_versions"),
        ({"reward": 0.1}, ProblemKind.REWARD, "trainer.old_logprobs"),
    ],
)
def test_each_problem_is_reported_once_with_the_setting_that_helps(
    changes: dict[str, float], kind: ProblemKind, setting: str
) -> None:
    found = [problem for problem in learning_problems(run(**changes)) if problem.kind is kind]
    assert len(found) == 1
    assert setting in found[0].advice
    # Not before the change, and within a window after it.
    assert 2 * WINDOW < found[0].step <= 3 * WINDOW


def test_logprobs_that_should_be_equal_and_are_not_are_reported_at_once() -> None:
    token = (
        "token 7 of sample 2 of group t1:1, sampled by publication 12 (lag 0): -1.5 in the engine, -1.25 in the trainer"
    )
    wrong = dataclasses.replace(HEALTHY, step=3, inexact=0.25, unequal=token)
    steps = [wrong if n == 3 else dataclasses.replace(HEALTHY, step=n, inexact=0.0) for n in range(1, 5)]
    (found,) = learning_problems(steps)
    assert (found.kind, found.step) == (ProblemKind.EXACTNESS, 3)
    assert found.seen == (
        f"25.00% of the compared tokens have other logprobs in the trainer than in the engine, most of all {token}"
    )


def test_equal_rewards_are_a_problem_unless_everything_is_solved() -> None:
    failing = [dataclasses.replace(HEALTHY, step=n, reward=0.0, solved=0.0) for n in range(1, 2 * WINDOW)]
    assert [problem.kind for problem in learning_problems(failing)] == [ProblemKind.VARIANCE]
    assert "every reward is 0" in str(learning_problems(failing)[0])
    solved = [dataclasses.replace(HEALTHY, step=n, reward=1.0, solved=1.0, entropy=1 / n) for n in range(1, 90)]
    assert learning_problems(solved) == ()


def test_a_run_that_solves_its_tasks_is_told_that_little_is_left_to_learn() -> None:
    """Completely solved groups are filtered, so that the trained samples do not show how good the policy is."""
    found = learning_problems(run(filtered=0.95, raw_solved=0.98, solved=0.6, entropy=0.01))
    assert [problem.kind for problem in found] == [ProblemKind.VARIANCE]
    assert "98% of the samples are solved" in found[0].seen
    assert found[0].advice == "End the run, or add harder tasks"


def test_solved_trained_samples_do_not_hide_a_collapse() -> None:
    found = learning_problems(run(raw_solved=0.5, solved=0.95, entropy=0.01))
    assert [problem.kind for problem in found] == [ProblemKind.ENTROPY]


def test_longer_responses_that_are_not_cut_off_are_no_problem() -> None:
    assert learning_problems(run(response_tokens=400.0, truncated=0.2)) == ()


@given(st.lists(st.floats(0, 1), min_size=1, max_size=60))
def test_small_changes_of_the_reward_raise_no_alarm(noise: list[float]) -> None:
    steps = [
        dataclasses.replace(HEALTHY, step=n, reward=0.4 + 0.05 * x + n / 1e4) for n, x in enumerate(noise, start=1)
    ]
    assert learning_problems(steps) == ()


VALUE = st.none() | st.sampled_from([-1e30, -1.0, 0.0, 1e-30, 0.5, 1.0, 1e30])


@given(st.lists(st.tuples(*[VALUE] * 8), min_size=WINDOW, max_size=WINDOW + 3))
def test_any_metrics_are_accepted(rows: list[tuple[float | None, ...]]) -> None:
    monitor = LearningMonitor()
    for n, (reward, solved, entropy, ratio, ess, tokens, truncated, filtered) in enumerate(rows, start=1):
        monitor.add(
            StepMetrics(
                step=n,
                time=0.0,
                reward=reward,
                solved=solved,
                entropy=entropy,
                ratio=ratio,
                ess=ess,
                response_tokens=tokens,
                truncated=truncated,
                filtered=filtered,
            )
        )
    kinds = [problem.kind for problem in monitor.problems]
    assert len(kinds) == len(set(kinds))


def test_the_terminal_prints_a_problem_once_and_the_summary_keeps_it(tmp_path: Path) -> None:
    append_rows(
        tmp_path / "metrics.jsonl",
        *({**trainer_row(step), "train/entropy": 2.0 if step < 20 else 0.01} for step in range(1, 41)),
    )
    state = RunReader(tmp_path).poll()
    assert [text.partition(" at step")[0] for text in state.problems] == ["entropy collapse"]
    assert summarise(tmp_path).problems == state.problems
    out = Console(file=io.StringIO(), width=200, color_system=None)
    renderer = ProgressRenderer(title="demo", total_steps=40, max_head_offpolicy_versions=1)
    with open_view(out, renderer) as update:
        for shown in (RunMetrics(), state, state):
            update(shown, [])
    text = out.file.getvalue()  # type: ignore[attr-defined]  # a StringIO
    assert text.count("warning: entropy collapse") == 1
    panel = Console(file=io.StringIO(), width=200, color_system=None)
    panel.print(renderer.panel(state, []))
    assert "entropy collapse" in panel.file.getvalue()  # type: ignore[attr-defined]  # a StringIO


def test_where_solved_is_unknown_the_best_reward_of_any_sample_says_whether_something_is_left_to_learn() -> None:
    """A run that ends at 1.195 of 1.2 has learned; one that stays far below what it has seen has not."""

    def ends_at(raw_reward: float, *, highest: float = 1.2, first: float = 0.3) -> set[ProblemKind]:
        collapsed = run(entropy=0.02)
        half = len(collapsed) // 2
        steps = [
            dataclasses.replace(
                step,
                solved=None,
                reward=raw_reward if number >= half or first == raw_reward else first + number / 10_000,
                raw_reward=first if number < half else raw_reward,
                highest_reward=highest,
            )
            for number, step in enumerate(collapsed)
        ]
        return {problem.kind for problem in learning_problems(steps)}

    assert ends_at(1.195) == set()
    assert ProblemKind.ENTROPY in ends_at(0.5)
    # Every sample of the run had the same reward: it has learned nothing.
    assert {ProblemKind.ENTROPY, ProblemKind.VARIANCE} <= ends_at(0.2, highest=0.2, first=0.2)
