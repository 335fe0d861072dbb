"""`/api/series`, `/api/freshness`, `/api/timeline` and `/api/compare`: what is drawn over steps and time."""

import asyncio
import math
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
from aiohttp import web

from rollbook.contracts.admission import Action, LedgerStatus
from rollbook.contracts.errors import RollbookError
from rollbook.dashboard.index.columns import DROPS
from rollbook.dashboard.index.index import ViewIndex
from rollbook.dashboard.run_view import RunView
from rollbook.dashboard.series import MAX_POINTS, Axis, MetricSeries, Series
from rollbook.dashboard.server.overview import unknown_wait
from rollbook.dashboard.server.request import BadPageRequestError, choice, number, whole_number
from rollbook.dashboard.server.runs import OpenRuns
from rollbook.dashboard.timeline import bounds, read_lanes

MAX_METRICS = 200
MAX_COMPARED = 8
MAX_MARKS = 2000
HEAT_BUCKETS = 500
MAX_LAGS = 64
FLOW_METRICS = (
    "async/staleness_capacity",
    "async/in_flight",
    "ledger/queued_groups",
    "perf/sample_wait_time",
    "async/version_offset_max",
    "async/version_offset_mean",
)


async def series(view: RunView, request: web.Request) -> dict[str, Any]:
    found = await view.series()
    if found is None:
        return {"metrics": [], "series": {}}
    wanted = _names(request)
    metrics = [
        {"name": name, "process": process, "last": last, **_meaning(view, name)}
        for name, process, last in found.names()
        if not wanted or name in wanted
    ]
    lines = await asyncio.to_thread(_lines, found, wanted, _window(request))
    return {"metrics": metrics, "series": lines}


@dataclass(frozen=True, slots=True)
class _Window:
    """The part of an axis that a chart shows."""

    axis: Axis = Axis.STEP
    low: float = -math.inf
    high: float = math.inf
    points: int = MAX_POINTS


def _lines(found: MetricSeries, names: Iterable[str], window: _Window) -> dict[str, Series]:
    lines = {
        name: found.series(name, window.axis, low=window.low, high=window.high, points=window.points) for name in names
    }
    return {name: line for name, line in lines.items() if line is not None}


def _names(request: web.Request) -> list[str]:
    names = [name for name in request.query.get("metrics", "").split(",") if name]
    if len(names) > MAX_METRICS:
        raise BadPageRequestError(f"{len(names)} metrics were requested; request at most {MAX_METRICS}")
    return list(dict.fromkeys(names))


def _window(request: web.Request) -> _Window:
    return _Window(
        axis=Axis(choice(request, "x", Axis.STEP, tuple(Axis))),
        low=number(request, "from", -math.inf),
        high=number(request, "to", math.inf),
        points=whole_number(request, "points", MAX_POINTS, low=1, high=MAX_POINTS),
    )


def _meaning(view: RunView, name: str) -> dict[str, str]:
    known = view.run.meanings.get(name)
    return {"unit": "", "meaning": ""} if known is None else {"unit": known.unit, "meaning": known.meaning}


async def freshness(view: RunView, _: web.Request) -> dict[str, Any]:
    index = await view.index()
    state = await index.update()
    heat = await index.read(_heat)
    status = await view.ledger.status()
    details, metrics, found = view.details, await view.metrics(), await view.series()
    lines: dict[str, Series] = {}
    if found is not None:
        lines = await asyncio.to_thread(_lines, found, FLOW_METRICS, _Window())
    stale, stale_tokens = await index.read(_stale)
    whole_s = metrics.wait_s + metrics.train_s
    wait_share = metrics.wait_s / whole_s if whole_s else None
    stale_share = stale / status.opened if status.opened else None
    return {
        "bound": details.max_head_offpolicy_versions,
        "policy": details.batch_policy,
        "groups_per_step": details.groups_per_step,
        "max_in_flight": details.max_in_flight,
        "capacity": status.capacity,
        "heat": heat,
        "series": lines,
        "cost": {
            "wait_s": metrics.wait_s,
            "train_s": metrics.train_s,
            "wait_share": wait_share,
            "stale_dropped": stale,
            "stale_share": stale_share,
            "stale_tokens": stale_tokens,
            "sentence": _cost(status, wait_share, stale, stale_share),
        },
        "index": state,
    }


def _cost(status: LedgerStatus, wait_share: float | None, stale: int, stale_share: float | None) -> str:
    waited = unknown_wait(status) if wait_share is None else f"The trainer waited {wait_share:.0%} of its time"
    if not stale or stale_share is None:
        return f"{waited}; no group was dropped for its age."
    return f"{waited}; {stale} groups ({stale_share:.1%}) were dropped for their age."


def _heat(index: ViewIndex) -> dict[str, Any]:
    """Groups by step and lag. Steps share a bucket if there are too many."""
    steps, lags = index.columns.step, index.columns.lag
    known = (steps >= 0) & (lags >= 0)
    steps, lags = steps[known], np.minimum(lags[known], MAX_LAGS - 1)
    if not len(steps):
        return {"steps": [], "step_size": 1, "lags": [], "counts": []}
    first, last = int(steps.min()), int(steps.max())
    size = max(1, math.ceil((last - first + 1) / HEAT_BUCKETS))
    num_lags = int(lags.max()) + 1
    buckets = (steps - first) // size
    num_buckets = (last - first) // size + 1
    counts = np.bincount(buckets * num_lags + lags, minlength=num_buckets * num_lags)
    return {
        "steps": [first + at * size for at in range(num_buckets)],
        "step_size": size,
        "lags": list(range(num_lags)),
        "counts": counts.reshape(num_buckets, num_lags).tolist(),
    }


def _stale(index: ViewIndex) -> tuple[int, float]:
    """How many groups were dropped for their age, and their sampled tokens."""
    columns = index.columns
    is_stale = columns.drop_kind == DROPS.index("stale")
    tokens = columns.tokens[is_stale] * columns.samples[is_stale]
    return int(is_stale.sum()), float(np.nansum(tokens))


async def timeline(view: RunView, request: web.Request) -> dict[str, Any]:
    limits = None if view.directory is None else await asyncio.to_thread(bounds, view.directory)
    if view.directory is None or limits is None:
        return {"from": None, "to": None, "begin": None, "end": None, "is_complete": True, "lanes": [], "marks": []}
    begin, end = limits
    low, high = number(request, "from", begin), number(request, "to", end)
    low, high = max(low, begin - 1.0), min(high, end + 1.0)
    if low > high:
        low, high = begin, end
    lanes, is_complete = await asyncio.to_thread(read_lanes, view.directory, low, high)
    return {
        "from": low,
        "to": high,
        "begin": begin,
        "end": end,
        "is_complete": is_complete,
        "lanes": lanes,
        "marks": await _marks(view, low, high),
    }


async def _marks(view: RunView, low: float, high: float) -> list[dict[str, Any]]:
    """When steps were trained and operators acted. A step's mark is the time of its row in the metrics."""
    found = await view.series()
    times = [] if found is None else found.step_times()
    marks = [
        {"at": at, "kind": "step", "label": f"step {step}", "step": step} for step, at in times if low <= at <= high
    ]
    stride = math.ceil(len(marks) / MAX_MARKS) or 1
    actions: Sequence[Action] = ()
    with suppress(RollbookError):  # the spans are shown without the ledger
        status = await view.ledger.status()
        if status.actions:
            actions = await view.ledger.actions(start=max(0, status.actions - MAX_MARKS), limit=MAX_MARKS)
    return [
        *marks[::stride],
        *(
            {
                "at": action.at,
                "kind": "action",
                "label": " ".join(filter(None, (action.kind, action.target, f"by {action.author}", action.note))),
                "step": None,
            }
            for action in actions
            if low <= action.at <= high
        ),
    ]


async def compare(runs: OpenRuns, request: web.Request) -> dict[str, Any]:
    keys = list(dict.fromkeys(key for key in request.query.get("runs", "").split(",") if key))
    if len(keys) > MAX_COMPARED:
        raise BadPageRequestError(f"{len(keys)} runs were requested; at most {MAX_COMPARED} can be compared")
    names = _names(request) or ["rollout/reward"]
    window = _window(request)
    listed, lines, settings = [], {name: dict[str, Series]() for name in names}, dict[str, dict[str, Any]]()
    for key in keys:
        view = await runs.find(key)
        found = await view.series()
        steps: int | None = None
        with suppress(RollbookError):  # its metrics can be compared nevertheless
            steps = (await view.ledger.status()).acknowledged_step
        listed.append({"key": key, "name": view.details.name, "path": view.details.path, "last_step": steps})
        if found is not None:
            for name, line in (await asyncio.to_thread(_lines, found, names, window)).items():
                lines[name][key] = line
        sections, _ = await asyncio.to_thread(view.run.config)
        for section in sections:
            for field in section.fields:
                settings.setdefault(field.path, {})[key] = field.value
    differing = {
        path: values
        for path, values in settings.items()
        if len(values) < len(keys) or any(value != next(iter(values.values())) for value in values.values())
    }
    return {"runs": listed, "series": lines, "config": differing}
