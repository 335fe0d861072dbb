"""The live panel and the plain lines, as text."""

import dataclasses
import io
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from rollbook.dashboard.run_files import RunReader
from rollbook.dashboard.run_metrics import EvaluationPoint, RunMetrics, Transcript
from rollbook.dashboard.terminal import SPARKS, ProcessStatus, ProgressRenderer, duration, flow, open_view, sparkline
from tests.parts.dashboard.run_dir import append_rows, trainer_row

PROCESSES = (
    ProcessStatus(name="trainer", pid=4101, state="running", doing="step 32: waiting for its batch", since_s=95),
    ProcessStatus(name="rollout-worker-0", pid=None, state="restarting", restarts=2, doing="in [2] s", since_s=1),
)


@pytest.fixture
def metrics(tmp_path: Path) -> RunMetrics:
    append_rows(tmp_path / "metrics.jsonl", *(trainer_row(step) for step in range(1, 33)))
    append_rows(
        tmp_path / "metrics.jsonl",
        {
            "process": "rollout",
            "time": 1.0,
            "async/in_flight": 12.0,
            "async/staleness_capacity": 4.0,
            "rollout/episodes": 32.0,
            "async/invalid_samples": 8.0,
            "rollout/groups_finished": 8.0,
            "async/filter_drops": 4.0,
            "rollout/worker_deaths": 1.0,
        },
    )
    return RunReader(tmp_path).poll()


def renderer(total_steps: int | None = 200) -> ProgressRenderer:
    return ProgressRenderer(title="demo [1]", total_steps=total_steps, max_head_offpolicy_versions=2)


def panel(metrics: RunMetrics, *processes: ProcessStatus, total_steps: int | None = 200, width: int = 100) -> list[str]:
    console = Console(file=io.StringIO(), width=width, color_system=None, legacy_windows=False)
    with console.capture() as captured:
        console.print(renderer(total_steps).panel(metrics, processes))
    return captured.get().splitlines()


def panel_text(metrics: RunMetrics, *processes: ProcessStatus, total_steps: int | None = 200) -> list[str]:
    return [line.strip("│ ").rstrip() for line in panel(metrics, *processes, total_steps=total_steps)]


def test_the_live_panel_shows_progress_metrics_and_processes(metrics: RunMetrics) -> None:
    shown = panel_text(metrics, *PROCESSES)
    assert shown[0].startswith("╭─ demo [1] ─")
    assert shown[1].startswith("step 32/200")
    assert shown[1].endswith("2m48s left")
    assert shown[2:-1] == [
        "reward        0.320  ▁▁▁▂▂▂▂▃▃▃▃▃▄▄▄▄▅▅▅▅▆▆▆▆▆▇▇▇▇███",
        "solved        52%    ▁▁▁▂▂▂▂▃▃▃▃▃▄▄▄▄▅▅▅▅▆▆▆▆▆▇▇▇▇███",
        "held out      -      not evaluated yet",
        "response      42     tokens; 10% truncated, 25% unscorable",
        "entropy       1.68   KL to the sampler 0.001",
        "groups        8      played; 50% filtered, 0% failed",
        "lag           2      max 2, bound 2",
        "trainer busy  75%    of the time; otherwise waiting for groups",
        "in flight     12     capacity 4, 100 tokens/s trained",
        "deaths        1      of workers; 2 restarts of processes",
        "",
        "process            pid  state         for  restarts  doing",
        "trainer           4101  running     1m35s            step 32: waiting for its batch",
        "rollout-worker-0     -  restarting     1s         2  in [2] s",
    ]


def test_the_view_says_whether_and_when_held_out_tasks_were_evaluated(metrics: RunMetrics) -> None:
    point = EvaluationPoint(step=30, tasks=40, reward=0.61, solved=0.64, low=0.58, high=0.7)
    evaluated = dataclasses.replace(metrics, evaluation=point)
    assert "held out      64%    solved at step 30 [58%–70%], reward 0.610, 40 tasks" in panel_text(evaluated)
    assert "held out 64% at step 30" in renderer().line(evaluated, ())
    rewarded = EvaluationPoint(step=30, tasks=40, reward=1.1, reward_low=1.05, reward_high=1.15)
    by_reward = dataclasses.replace(metrics, evaluation=rewarded)
    assert "held out      1.100  reward at step 30 [1.050–1.150], 40 tasks" in panel_text(by_reward)
    assert "held out 1.100 at step 30" in renderer().line(by_reward, ())
    without = dataclasses.replace(renderer(), has_evaluation=False)
    console = Console(file=io.StringIO(), width=100)
    with console.capture() as captured:
        console.print(without.panel(metrics, ()))
    assert "not evaluated: evaluation.every_steps is not set" in captured.get()


def test_the_last_transcript_is_shown_and_printed_once_in_plain_lines(metrics: RunMetrics) -> None:
    spoken = Transcript(time=7.0, group_id="a@0", reward=1.0, messages=(("user", "2+2?\nSay it."), ("assistant", "4")))
    shown = dataclasses.replace(metrics, transcript=spoken)
    lines = ["sample of a@0: reward 1", "  user: 2+2? Say it.", "  assistant: 4"]
    text = panel_text(shown)
    assert all(line.strip() in [one.strip() for one in text] for line in lines)
    file = io.StringIO()
    with open_view(Console(file=file), renderer()) as update:
        update(shown, ())
        update(shown, ())
    assert file.getvalue().splitlines()[:3] == lines
    assert file.getvalue().count("sample of") == 1


def test_a_run_that_has_not_started_shows_dashes() -> None:
    shown = panel_text(RunMetrics())
    assert shown[1].startswith("step 0/200")
    assert shown[1].endswith("- left")
    assert [line.split() for line in shown[2:4]] == [["reward", "-"], ["solved", "-"]]


def test_a_run_without_max_steps_shows_its_pace(metrics: RunMetrics) -> None:
    line = panel_text(metrics, total_steps=None)[1]
    assert line.startswith("step 32 ")
    assert line.endswith("1.00s a step")


def test_the_live_panel_fits_a_narrow_terminal(metrics: RunMetrics) -> None:
    assert all(len(line) <= 50 for line in panel(metrics, *PROCESSES, width=50))


def test_on_a_terminal_the_view_redraws_in_place_and_leaves_the_last_state(metrics: RunMetrics) -> None:
    file = io.StringIO()
    with open_view(Console(file=file, force_terminal=True, width=100), renderer()) as update:
        update(RunMetrics(), ())
        update(metrics, PROCESSES)
    assert "\x1b[" in file.getvalue()
    assert "step 32/200" in file.getvalue().split("step 0/200")[-1]


def test_without_a_terminal_the_view_prints_plain_lines_without_control_codes(metrics: RunMetrics) -> None:
    file = io.StringIO()
    with open_view(Console(file=file), renderer()) as update:
        update(metrics, PROCESSES)
    assert file.getvalue() == (
        "demo [1]: step 32/200  reward 0.320  solved 52%  lag 2/2  trainer busy 75%  2m48s left"
        "  worker deaths 1  [rollout-worker-0 restarting]\n"
    )


def test_before_the_first_step_the_plain_line_says_what_each_process_waits_for() -> None:
    processes = (
        ProcessStatus(name="ledger", pid=1, state="running", doing="serving"),
        ProcessStatus(name="policy", pid=2, state="starting", doing="loading the model"),
        ProcessStatus(name="trainer", pid=3, state="starting", doing="loading the model"),
        ProcessStatus(name="rollout", pid=None, state="waiting", doing="for the ledger"),
    )
    assert renderer().line(RunMetrics(), processes) == (
        "demo [1]: step 0/200  ledger: serving; policy, trainer: loading the model; rollout: waiting for the ledger"
    )


def test_plain_lines_are_printed_every_few_seconds_and_the_last_state_always() -> None:
    file, now = io.StringIO(), [0.0]
    with open_view(Console(file=file), renderer(total_steps=9), interval_s=5.0, now=lambda: now[0]) as update:
        for step, at in ((0, 0.0), (1, 1.0), (2, 4.9), (3, 5.0), (4, 6.0)):
            now[0] = at
            update(RunMetrics(last_step=step), ())
    steps = [line.split("  ")[0] for line in file.getvalue().splitlines()]
    assert steps == ["demo [1]: step 0/9", "demo [1]: step 3/9", "demo [1]: step 4/9"]


def test_a_plain_line_that_says_nothing_new_is_repeated_once_a_minute() -> None:
    file, now = io.StringIO(), [0.0]
    with open_view(Console(file=file), renderer(), interval_s=5.0, now=lambda: now[0]) as update:
        for at in range(0, 130, 5):
            now[0] = float(at)
            update(RunMetrics(last_step=0), ())
    assert len(file.getvalue().splitlines()) == 3


def test_the_last_state_is_not_printed_twice() -> None:
    file = io.StringIO()
    with open_view(Console(file=file), renderer()) as update:
        update(RunMetrics(last_step=9), ())
    assert len(file.getvalue().splitlines()) == 1


@given(values=st.lists(st.none() | st.floats(-1e6, 1e6), max_size=300), width=st.integers(1, 64))
def test_a_sparkline_has_one_block_for_each_share_of_the_values(values: list[float | None], width: int) -> None:
    known = [value for value in values if value is not None]
    line = sparkline(values, width)
    assert len(line) == min(width, len(known))
    assert set(line) <= set(SPARKS)


def test_a_rising_series_has_rising_blocks() -> None:
    assert sparkline([float(n) for n in range(8)], 8) == SPARKS
    assert sparkline([0.5, 0.5, 0.5]) == SPARKS[0] * 3


@pytest.mark.parametrize(
    ("seconds", "text"), [(None, "-"), (0.4, "0s"), (59.4, "59s"), (59.6, "1m00s"), (200, "3m20s"), (7500, "2h05m")]
)
def test_durations_are_formatted_shortly(seconds: float | None, text: str) -> None:
    assert duration(seconds) == text


def test_a_biased_selection_is_shown_with_its_worst_measure() -> None:
    gauges = {"fairness/biased_measures": 2.0, "fairness/ks_tokens": 0.15, "fairness/ks_seconds": 0.4}
    assert "trained groups differ from dispatched groups in seconds" in flow(RunMetrics(gauges=gauges))
    assert "differ" not in flow(RunMetrics(gauges={**gauges, "fairness/biased_measures": 0.0}))


def test_a_transcript_cannot_control_the_terminal(metrics: RunMetrics) -> None:
    hostile = "before \x1b]52;c;AAAA\x07 \x1b[2J \x9b5A after"
    shown = dataclasses.replace(
        metrics, transcript=Transcript(time=7.0, group_id="a@0", reward=1.0, messages=(("assistant", hostile),))
    )
    for is_terminal in (True, False):
        file = io.StringIO()
        with open_view(Console(file=file, force_terminal=is_terminal, width=200), renderer()) as update:
            update(shown, ())
        assert "before \ufffd]52;c;AAAA\ufffd \ufffd[2J \ufffd5A after" in file.getvalue()
