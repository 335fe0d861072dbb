"""Fits the durations of a simulation to one or several traces, and remembers what the traces cover.

One trace shows one size of a run: it cannot tell whether a second replica or a second worker adds speed. Several traces with
different sizes can. What they do not cover is assumed, and every prediction says so.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from rollbook.simulation.durations import (
    Durations,
    Episode,
    RequestTime,
    TaskDurations,
    TrainingTime,
    Turn,
)
from rollbook.simulation.processors import (
    UNLIMITED,
    fit_processors,
    slowness_during,
    training_seconds,
)
from rollbook.simulation.trace import Trace, TracedEpisode
from rollbook.telemetry.intervals import Intervals

Array = NDArray[np.float64]

LOAD_BINS, SHARE_BINS = 12, 3
SLOWDOWNS = np.linspace(0.0, 3.0, 61)
MIN_SPREAD = 0.15
"""A share of time that varies less than this over the trace says nothing about its effect."""
MAX_ERROR_RATIO = 0.9
"""Keep a term only if it cuts the squared error by 10 %."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Covered:
    """The sizes that the traces contain."""

    replicas: frozenset[int]
    workers: frozenset[int]
    max_load: float
    """Most requests of one replica, leaving out the highest percent."""
    samples_per_step: tuple[int, int]
    overlap: tuple[float, float]
    """Smallest and largest share of a training step in which requests were generated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    durations: Durations
    covered: Covered
    request_error: float
    """Mean relative error of the expected duration of a request, over groups of similar requests."""
    traces: tuple[Trace, ...]


@dataclass(frozen=True, slots=True)
class _Requests:
    """Requests of one trace: duration with a core for each process, concurrent requests, and the share of their time in which the
    trainer trained."""

    seconds: Array
    load: Array
    training: Array
    slowness: float
    """By how much the cores of the trace slowed them, on average."""
    replicas: int
    per_device: int
    workers: int


def fit(traces: Sequence[Trace]) -> Fit:
    processors = fit_processors(traces)
    requests = [_requests_of(trace) for trace in traces]
    request_time, error = _fit_requests(requests, is_sharing_known=processors is not UNLIMITED)
    training_time, overlap = _fit_training(traces)
    samples = [step.samples for trace in traces for step in trace.steps]
    return Fit(
        durations=Durations(
            tasks=_tasks(traces, requests, request_time),
            request=request_time,
            training=training_time,
            processors=processors,
            settle_s=tuple(float(seconds) for trace in traces for seconds in _settle_s(trace)) or (0.0,),
            open_s=_mean(trace.open_s / run.slowness for trace, run in zip(traces, requests, strict=True)),
            submit_s=_mean(trace.submit_s / run.slowness for trace, run in zip(traces, requests, strict=True)),
            fetch_s=_mean(trace.fetch_s / run.slowness for trace, run in zip(traces, requests, strict=True)),
            between_steps_s=_mean(trace.between_steps_s for trace in traces),
        ),
        covered=Covered(
            replicas=frozenset(one.replicas for one in requests),
            workers=frozenset(one.workers for one in requests),
            max_load=max(float(np.quantile(one.load / one.replicas, 0.99)) for one in requests),
            samples_per_step=(min(samples), max(samples)),
            overlap=overlap,
        ),
        request_error=error,
        traces=tuple(traces),
    )


def _settle_s(trace: Trace) -> Array:
    return trace.settling.lengths / slowness_during(trace, trace.settling)


def _mean(values: Iterable[float]) -> float:
    return float(np.mean(list(values)))


def _requests_of(trace: Trace) -> _Requests:
    pairs = np.array([request for one in trace.episodes for request in one.requests])
    own = Intervals(pairs[:, 0], pairs[:, 1])
    setting = trace.run.setting
    slowness = slowness_during(trace, own)
    return _Requests(
        seconds=own.lengths / slowness,
        load=np.maximum(1.0, trace.requests.concurrency_during(own)),
        training=trace.share_with_training(own),
        slowness=float(slowness.mean()),
        replicas=setting.replicas,
        per_device=setting.replicas_per_device,
        workers=setting.workers,
    )


def _fit_requests(runs: Sequence[_Requests], *, is_sharing_known: bool) -> tuple[RequestTime, float]:
    """Affine in the load. Terms for what replicas or workers share only if the traces have different numbers of them.

    `is_sharing_known`: from the CPU times.
    """
    rows = np.concatenate([_binned(run) for run in runs])
    seconds, load, training, replicas, per_device, workers, count = rows.T
    columns = {"base_s": np.ones(len(rows)), "per_request_s": load / replicas * per_device}
    if not is_sharing_known and len({run.replicas for run in runs}) > 1:
        columns["per_total_s"] = load
    if not is_sharing_known and len({run.workers for run in runs}) > 1:
        columns["per_worker_s"] = load / workers
    slowdowns = SLOWDOWNS if np.ptp(training) >= MIN_SPREAD else SLOWDOWNS[:1]
    # Relative errors: a request under a small load counts as much as one under a large load.
    weights = np.sqrt(count) / np.maximum(seconds, 1e-6)
    best: tuple[float, float, dict[str, float]] | None = None
    for slowdown in slowdowns:
        factor = 1.0 + slowdown * training
        error, found = _least_squares({name: c * factor * weights for name, c in columns.items()}, seconds * weights)
        if best is None or error < best[0]:
            best = (error, float(slowdown), found)
    assert best is not None
    _, slowdown, found = best
    expected = sum(columns[name] * value for name, value in found.items()) * (1.0 + slowdown * training)
    relative = np.abs(expected - seconds) / np.maximum(seconds, 1e-6)
    return (
        RequestTime(
            base_s=found.get("base_s", 0.0),
            per_request_s=found.get("per_request_s", 0.0),
            per_total_s=found.get("per_total_s", 0.0),
            per_worker_s=found.get("per_worker_s", 0.0),
            slowdown=slowdown,
        ),
        float(np.average(relative, weights=count)),
    )


def _binned(run: _Requests) -> Array:
    """Means over requests of similar load and overlap: their number would otherwise outweigh rare loads."""
    edges = np.unique(np.quantile(run.load, np.linspace(0, 1, LOAD_BINS + 1)))
    by_load = np.searchsorted(edges[1:-1], run.load)
    by_share = np.minimum(SHARE_BINS - 1, (run.training * SHARE_BINS).astype(np.int64))
    found = []
    for key in np.unique(by_load * SHARE_BINS + by_share):
        inside = by_load * SHARE_BINS + by_share == key
        means = [float(values[inside].mean()) for values in (run.seconds, run.load, run.training)]
        found.append([*means, run.replicas, run.per_device, run.workers, int(inside.sum())])
    return np.array(found, dtype=np.float64)


def _least_squares(columns: dict[str, Array], target: Array) -> tuple[float, dict[str, float]]:
    """The squared error and the coefficients, none of them negative. Terms that hardly reduce the error are left out."""
    best: tuple[float, dict[str, float]] = (float(target @ target), {})
    for size in range(1, len(columns) + 1):
        of_size: tuple[float, dict[str, float]] | None = None
        for names in combinations(columns, size):
            matrix = np.stack([columns[name] for name in names], axis=1)
            values, *_ = np.linalg.lstsq(matrix, target, rcond=None)
            error = float(((matrix @ values - target) ** 2).sum())
            if (values >= 0).all() and (of_size is None or error < of_size[0]):
                of_size = (error, dict(zip(names, map(float, values), strict=True)))
        if of_size is not None and of_size[0] <= best[0] * MAX_ERROR_RATIO:
            best = of_size
    return best


def _fit_training(traces: Sequence[Trace]) -> tuple[TrainingTime, tuple[float, float]]:
    steps = [step for trace in traces for step in trace.steps]
    overlap = np.concatenate([trace.share_with_requests(trace.step_times) for trace in traces])
    seconds = np.concatenate([training_seconds(trace) for trace in traces])
    columns = {
        "per_token_s": np.array([float(step.computed_tokens) for step in steps]),
        "per_sample_s": np.array([float(step.computed_samples) for step in steps]),
        "base_s": np.ones(len(steps)),
    }
    weights = 1.0 / np.maximum(seconds, 1e-6)
    slowdowns = SLOWDOWNS if np.ptp(overlap) >= MIN_SPREAD else SLOWDOWNS[:1]
    best: tuple[float, float, dict[str, float]] | None = None
    for slowdown in slowdowns:
        factor = (1.0 + slowdown * overlap) * weights
        error, found = _least_squares({name: c * factor for name, c in columns.items()}, seconds * weights)
        if best is None or error < best[0]:
            best = (error, float(slowdown), found)
    assert best is not None
    _, slowdown, found = best
    expected = sum(columns[name] * value for name, value in found.items()) * (1.0 + slowdown * overlap)
    return (
        TrainingTime(
            base_s=found.get("base_s", 0.0),
            per_sample_s=found.get("per_sample_s", 0.0),
            per_token_s=found.get("per_token_s", 0.0),
            slowdown=slowdown,
            spread=tuple(float(ratio) for ratio in seconds / np.maximum(expected, 1e-9)),
        ),
        (float(overlap.min()), float(overlap.max())),
    )


def _tasks(traces: Sequence[Trace], runs: Sequence[_Requests], request: RequestTime) -> tuple[TaskDurations, ...]:
    episodes: dict[str, dict[tuple[int, str], list[Episode]]] = defaultdict(lambda: defaultdict(list))
    groups: Counter[str] = Counter()
    dropped: Counter[str] = Counter()
    for number, (trace, run) in enumerate(zip(traces, runs, strict=True)):
        slope = request.slope(replicas=run.replicas, per_device=run.per_device, workers=run.workers)
        expected = (request.base_s + slope * run.load / run.replicas) * (1.0 + request.slowdown * run.training)
        works = iter((run.seconds / np.maximum(expected, 1e-9)).tolist())
        for one in trace.episodes:
            episode = _episode(one, [next(works) for _ in one.requests])
            episodes[one.task_id][number, one.group_id].append(episode)
        groups.update(trace.groups_by_task)
        dropped.update(trace.dropped_by_task)
    return tuple(
        TaskDurations(
            groups=tuple(tuple(members) for members in found.values()),
            drop_share=dropped.get(task, 0) / max(1, groups.get(task, 0)),
        )
        for task, found in sorted(episodes.items())
    )


def _episode(traced: TracedEpisode, works: Sequence[float]) -> Episode:
    starts = [*(start for start, _ in traced.requests[1:]), traced.end]
    return Episode(
        turns=tuple(
            Turn(work=work, act_s=max(0.0, following - end))
            for work, (_, end), following in zip(works, traced.requests, starts, strict=True)
        ),
        other_s=max(0.0, traced.requests[0][0] - traced.start),
        tokens=traced.tokens,
    )
