"""Durations fitted to traces whose true durations are known, and what a prediction says about its limits."""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from rollbook.commands.record.simulate import configured_run, simulate
from rollbook.contracts.errors import UsageError
from rollbook.contracts.freshness import BatchPolicy
from rollbook.run.config.run import load_config
from rollbook.simulation.fit import fit
from rollbook.simulation.prediction import (
    extrapolations,
    frontier,
    on_machine,
    predict,
    recommend,
    what_ifs,
)
from rollbook.simulation.processors import UNLIMITED, Processors
from rollbook.simulation.report import PredictionReport, bottleneck, recommendation, report_lines
from rollbook.simulation.setting import ConfiguredRun
from rollbook.simulation.trace import Trace, TracedCpu, TracedEpisode, TracedStep, traced_cpu
from rollbook.telemetry.intervals import Intervals
from rollbook.telemetry.spans import Span

DEMO = Path(__file__).parents[3] / "rollbook" / "demo" / "run.toml"
STEP_S = 0.5


def demo(*overrides: str) -> ConfiguredRun:
    return configured_run(load_config(DEMO, overrides).config)


def trace(
    run: ConfiguredRun,
    *,
    base_s: float = 0.1,
    per_request_s: float = 0.0,
    loads: Sequence[int] = (4, 16, 64, 128),
    cpu: TracedCpu | None = None,
) -> Trace:
    """Waves of concurrent episodes with two requests each, and training steps of 0.2 s and 10 ms a sample between them."""
    episodes: list[TracedEpisode] = []
    steps: list[TracedStep] = []
    now = 0.0
    for wave in range(24):
        load = loads[wave % len(loads)]
        request_s = base_s + per_request_s * load
        requests = ((now, now + request_s), (now + request_s + STEP_S, now + 2 * request_s + STEP_S))
        end = requests[1][1] + STEP_S
        episodes += [
            TracedEpisode(
                task_id=f"task-{number % 4}",
                group_id=f"task-{number % 4}@{wave}",
                start=now,
                end=end,
                requests=requests,
                tokens=2,
            )
            for number in range(load)
        ]
        samples = 32 + wave
        train_s = 0.2 + 0.01 * samples
        steps.append(
            TracedStep(
                step=wave + 1,
                start=end,
                end=end + train_s,
                samples=samples,
                tokens=2 * samples,
                computed_samples=samples,
                computed_tokens=2 * samples,
            )
        )
        now = end + train_s
    starts = np.array([start for one in episodes for start, _ in one.requests])
    ends = np.array([end for one in episodes for _, end in one.requests])
    return Trace(
        path=Path("trace"),
        run=run,
        episodes=tuple(episodes),
        steps=tuple(steps),
        requests=Intervals(starts, ends),
        training=Intervals(np.array([s.start for s in steps]), np.array([s.end for s in steps])),
        groups_by_task={},
        dropped_by_task={},
        settling=Intervals(np.array([s.end for s in steps]), np.array([s.end + 0.05 for s in steps])),
        open_s=0.0,
        submit_s=0.0,
        fetch_s=0.0,
        between_steps_s=0.0,
        cpu=cpu,
    )


def shares(made: Trace) -> tuple[float, float, float]:
    """The shares of its time in which requests ran and in which it trained, and its requests per second."""
    begin, end = made.steps[0].start, made.steps[-1].end
    busy = made.requests.union().within(begin, end)
    inside = (made.requests.starts >= begin) & (made.requests.starts < end)
    training_s = sum(step.end - step.start for step in made.steps)
    seconds = end - begin
    return float((busy.ends - busy.starts).sum()) / seconds, training_s / seconds, int(inside.sum()) / seconds


def test_the_duration_of_a_request_is_fitted_over_the_load() -> None:
    found = fit([trace(demo(), base_s=0.1, per_request_s=0.002)])
    assert found.durations.request.base_s == pytest.approx(0.1, rel=1e-3)
    assert found.durations.request.per_request_s == pytest.approx(0.002, rel=1e-3)
    assert found.request_error < 1e-3
    works = [t.work for task in found.durations.tasks for group in task.groups for one in group for t in one.turns]
    assert works == pytest.approx([1.0] * len(works))


def test_external_servers_of_a_trace_are_replicas() -> None:
    """Four servers share the load: each other request of the same server costs four times what one of any server does."""
    run = demo('inference.urls=["http://a:1","http://b:1","http://c:1","http://d:1"]', "inference.replicas=1")
    found = fit([trace(run, base_s=0.1, per_request_s=0.002)])
    assert run.setting.replicas == 4
    assert found.covered.replicas == {4}
    assert found.durations.request.per_request_s == pytest.approx(0.008, rel=1e-3)


def test_a_training_step_is_fitted_over_its_samples() -> None:
    training = fit([trace(demo())]).durations.training
    assert training.seconds(samples=200, tokens=400) == pytest.approx(0.2 + 0.01 * 200, rel=1e-3)


@pytest.mark.parametrize(("shares", "expected"), [(False, 0.001), (True, 0.002)])
def test_two_traces_show_whether_replicas_share_a_machine(shares: bool, expected: float) -> None:
    """With two replicas, a request takes half as long for each other request, unless both replicas share one machine."""
    one = trace(demo(), base_s=0.1, per_request_s=0.002)
    two = trace(demo("inference.replicas=2"), base_s=0.1, per_request_s=0.002 if shares else 0.001)
    request = fit([one, two]).durations.request
    # Seconds for each concurrent request in all.
    assert request.slope(replicas=2, per_device=1, workers=1) / 2 == pytest.approx(expected, rel=0.02)


def cpu_span(
    process: str, role: str, *, used_s: float, waited_s: float = 0.0, busy_s: float = 8.0, node: str = "a"
) -> Span:
    fields = {"role": role, "used_s": used_s, "waited_s": waited_s, "busy_s": busy_s, "cores": 2.0, "node": node}
    return Span(process=process, name="process.cpu", start=100.0, end=104.0, id=1, fields=fields)


def test_the_cores_of_a_trace_are_those_that_other_programs_left() -> None:
    spans = [
        cpu_span("policy-0", "policy", used_s=2.0, waited_s=1.0),
        cpu_span("policy-1", "policy", used_s=1.0, waited_s=0.4),
        cpu_span("trainer", "trainer", used_s=2.0),
    ]
    found = traced_cpu(spans)
    assert found is not None
    assert found.used == {"policy": 0.75, "trainer": 0.5}
    assert found.waited == pytest.approx({"policy": 0.35, "trainer": 0.0})
    # Two cores were busy all the time, 1.25 of them with this run.
    assert found.cores == pytest.approx(1.25)
    alone = traced_cpu([cpu_span("trainer", "trainer", used_s=2.0, busy_s=2.0)])
    assert alone is not None
    assert alone.cores == 2.0
    assert traced_cpu([]) is None
    assert traced_cpu([*spans, cpu_span("policy-2", "policy", used_s=1.0, node="b")]) is None


@pytest.mark.parametrize(("gpus", "expected"), [("[]", 0.004), ("[0, 1]", 0.002)])
def test_replicas_on_one_gpu_share_it(gpus: str, expected: float) -> None:
    found = fit([trace(demo('inference.device="cuda"'), per_request_s=0.002)])
    run = demo('inference.device="cuda"', "inference.replicas=2", f"resources.policy_gpus={gpus}")
    setting = run.setting
    slope = found.durations.request.slope(replicas=2, per_device=setting.replicas_per_device, workers=1)
    assert slope == pytest.approx(expected, rel=1e-3)


def test_the_cores_that_processes_need_are_fitted_to_their_cpu_time() -> None:
    busy, training, rate = shares(trace(demo()))
    used = {"policy": 0.3 * busy, "trainer": 0.9 * training, "worker": 0.003 * rate, "ledger": 0.001 * rate}
    cpu = TracedCpu(cores=4.0, used=used, waited={"policy": 0.2 * busy, "worker": 0.1})
    found = fit([trace(demo(), cpu=cpu)]).durations.processors
    assert found.cores == 4.0
    assert found.worker_s == pytest.approx(0.003)
    assert found.request_s == pytest.approx(0.004 + 0.3 * busy / rate)
    assert found.trainer == pytest.approx(0.9)


def test_durations_are_fitted_without_the_wait_for_cores_of_the_trace() -> None:
    free = trace(demo(), loads=(128,))
    busy, training, _ = shares(free)
    # Each of them needs a core, and gets half of one.
    half = {"policy": busy / 2, "trainer": training / 2}
    short = trace(demo(), loads=(128,), cpu=TracedCpu(cores=0.5, used=half, waited=half))
    slow, fast = fit([short]).durations, fit([free]).durations
    assert slow.request.base_s == pytest.approx(fast.request.base_s / 2)
    assert slow.training.base_s == pytest.approx(fast.training.base_s / 2)
    # On the same cores, the traced run takes as long as it did.
    setting = demo("gate.max_head_offpolicy_versions=0", "gate.max_groups_in_flight=16").setting
    of_slow, of_fast = predict(setting, slow, steps=12), predict(setting, fast, steps=12)
    assert of_slow.steps_per_s == pytest.approx(of_fast.steps_per_s, rel=0.02)
    more = replace(slow, processors=replace(slow.processors, cores=1.0))
    assert predict(setting, more, steps=12).steps_per_s > 1.1 * of_slow.steps_per_s


def test_a_prediction_for_other_cores_says_so() -> None:
    cpu = TracedCpu(cores=2.0, used={"policy": 0.5, "worker": 0.2}, waited={})
    found = fit([trace(demo(), cpu=cpu)])
    run = demo("inference.replicas=2", "rollout.workers=2")
    more = on_machine(found, run, cores=8.0)
    assert more.durations.processors.cores == 8.0
    texts = extrapolations(more, run, predict(run.setting, more.durations, steps=12))
    for part in (
        "the run has 8 cores; the trace has 2",
        "inference.replicas is 2, the trace has 1: all processes are assumed to share 8",
    ):
        assert any(part in text for text in texts), f"{part!r} is not in {texts}"
    same = on_machine(found, run)
    assert same.durations.processors.cores == 2.0
    assert not any(
        "the run has" in text for text in extrapolations(same, run, predict(run.setting, same.durations, steps=12))
    )


def test_the_cores_of_a_trace_do_not_limit_a_run_on_several_machines() -> None:
    cpu = TracedCpu(cores=2.0, used={"policy": 0.5, "worker": 0.2}, waited={})
    found = fit([trace(demo(), cpu=cpu)])
    assert on_machine(found, demo("cluster.allow_join=true")).durations.processors is UNLIMITED


def test_the_bottleneck_may_be_the_cores_or_the_workers() -> None:
    durations = fit([trace(demo(), per_request_s=0.0001)]).durations
    setting = demo().setting
    for processors, expected in (
        (Processors(cores=2.0, request_s=0.05, worker_s=0.001), "cores"),
        (Processors(cores=100.0, request_s=0.05, worker_s=0.05), "workers"),
    ):
        limited = replace(durations, processors=processors)
        base = predict(setting, limited, steps=12)
        gains = what_ifs(base, limited, steps=12)
        assert gains[0].name == expected
        assert "core" in bottleneck(base, gains)


def test_a_trace_without_cpu_times_has_no_limit_of_cores() -> None:
    cpu = TracedCpu(cores=2.0, used={"policy": 0.5}, waited={})
    assert fit([trace(demo(), cpu=cpu), trace(demo())]).durations.processors is UNLIMITED


def test_a_prediction_names_what_the_trace_does_not_cover() -> None:
    found = fit([trace(demo(), per_request_s=0.002, loads=(4, 8))])
    run = demo("inference.replicas=3", "rollout.workers=2", "inference.max_running=64", "gate.groups_per_step=64")
    texts = extrapolations(found, run, predict(run.setting, found.durations, steps=12))
    for part in (
        "concurrent requests; the trace has at most",
        "inference.replicas is 3, the trace has 1",
        "rollout.workers is 2, the trace has 1",
        "a step has 512 samples",
        "inference.max_running",
        "training with concurrent generation was not traced",
    ):
        assert any(part in text for text in texts), f"{part!r} is not in {texts}"
    same = demo("gate.groups_per_step=5")
    quiet = extrapolations(found, same, predict(same.setting, found.durations, steps=12))
    assert not any("replicas" in text or "differ" in text for text in quiet)


def test_the_bottleneck_is_the_part_whose_doubling_gains_most() -> None:
    durations = fit([trace(demo(), per_request_s=0.0001)]).durations
    slow_training = replace(durations, training=replace(durations.training, base_s=5.0))
    base = predict(demo().setting, slow_training, steps=12)
    gains = what_ifs(base, slow_training, steps=12)
    assert gains[0].name == "trainer"
    assert bottleneck(base, gains).startswith("the trainer, which trains 100% of the time")
    slow_engines = replace(durations, request=replace(durations.request, per_request_s=0.02))
    base = predict(demo().setting, slow_engines, steps=12)
    assert what_ifs(base, slow_engines, steps=12)[0].name == "engines"


def test_more_groups_in_flight_are_recommended_only_if_they_help() -> None:
    durations = fit([trace(demo(), per_request_s=0.0)]).durations
    few = predict(demo("gate.max_groups_in_flight=4").setting, durations, steps=12)
    better = recommend(few, durations, steps=12)
    assert better.setting.rule.max_in_flight > 4
    assert better.tokens_per_s > few.tokens_per_s
    assert "gate.max_groups_in_flight = " in recommendation(few, better)
    assert recommend(better, durations, steps=12).tokens_per_s <= better.tokens_per_s * 1.05
    assert "keep the settings" in recommendation(better, better)


def test_a_gain_that_needs_more_slots_names_their_setting() -> None:
    durations = fit([trace(demo(), per_request_s=0.0)]).durations
    run = demo("gate.max_groups_in_flight=4", "rollout.workers=2", "rollout.groups_per_worker=2")
    few = predict(run.setting, durations, steps=12)
    better = recommend(few, durations, steps=12)
    assert better.setting.slots > 4
    size = better.setting.rule.max_in_flight
    assert f"gate.max_groups_in_flight = {size}, rollout.groups_per_worker = {size // 2}" in recommendation(few, better)
    [doubled] = [one for one in what_ifs(few, durations, steps=12) if one.name == "groups in flight"]
    assert doubled.text == "gate.max_groups_in_flight = 8, rollout.groups_per_worker = 4"


def test_the_frontier_has_no_point_that_another_one_beats() -> None:
    durations = fit([trace(demo(), per_request_s=0.001)]).durations
    points = [
        predict(demo(f"gate.max_head_offpolicy_versions={bound}").setting, durations, steps=12) for bound in (0, 1, 2)
    ]
    best = frontier(points)
    assert best[0].lag_mean == 0
    assert all(a.lag_mean <= b.lag_mean and a.tokens_per_s < b.tokens_per_s for a, b in pairwise(best))


def test_the_report_is_plain_text_and_plain_json() -> None:
    found = fit([trace(demo())])
    base = predict(demo().setting, found.durations, steps=12)
    report = PredictionReport(
        fit=found,
        prediction=base,
        what_ifs=tuple(what_ifs(base, found.durations, steps=12)),
        recommended=base,
        extrapolations=("a sentence",),
    )
    text = "\n".join(report_lines(report))
    for word in ("throughput", "lag", "idle", "bottleneck", "recommended", "extrapolated  a sentence"):
        assert word in text
    row = report.row()
    assert math.isclose(row["prediction"]["steps_per_s"], base.steps_per_s, rel_tol=1e-3)
    assert row["prediction"]["batch_policy"] == BatchPolicy.WAIT


def test_a_simulation_without_a_usable_trace_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--trace RUN"):
        simulate(DEMO, [])
    with pytest.raises(UsageError, match="missing"):
        simulate(DEMO, [tmp_path / "missing"])
