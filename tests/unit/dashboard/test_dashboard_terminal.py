"""The live panel and the plain lines, as text."""

import io
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from rollbook.dashboard.run_files import RunReader
from rollbook.dashboard.run_metrics import RunMetrics
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
        {"process": "rollout", "time": 1.0, "async/in_flight": 12.0, "async/staleness_capacity": 4.0},
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
        "lag           2      max 2, bound 2",
        "trainer busy  75%    of the time; otherwise waiting for groups",
        "in flight     12     capacity 4, 100 tokens/s trained",
        "",
        "process            pid  state         for  restarts  doing",
        "trainer           4101  running     1m35s            step 32: waiting for its batch",
        "rollout-worker-0     -  restarting     1s         2  in [2] s",
    ]


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
        "  [rollout-worker-0 restarting]\n"
    )


def test_plain_lines_are_printed_every_few_seconds_and_the_last_state_always() -> None:
    file, now = io.StringIO(), [0.0]
    with open_view(Console(file=file), renderer(total_steps=9), interval_s=5.0, now=lambda: now[0]) as update:
        for step, at in ((0, 0.0), (1, 1.0), (2, 4.9), (3, 5.0), (4, 6.0)):
            now[0] = at
            update(RunMetrics(last_step=step), ())
    steps = [line.split("  ")[0] for line in file.getvalue().splitlines()]
    assert steps == ["demo [1]: step 0/9", "demo [1]: step 3/9", "demo [1]: step 4/9"]


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
