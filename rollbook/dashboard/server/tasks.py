"""`/api/tasks`: what became of each task, and the curriculum's tiers."""

import asyncio
import math
from typing import Any

import numpy as np
from aiohttp import web

from rollbook.dashboard.index.columns import STATES
from rollbook.dashboard.index.index import ViewIndex
from rollbook.dashboard.run_files import MasteryPoint, read_mastery
from rollbook.dashboard.run_view import RunView
from rollbook.dashboard.server.request import checked_number, choice, whole_number
from rollbook.dashboard.server.task_texts import read_task_texts

MAX_TASKS = 500
MASTERY_POINTS = 500
SORTS = ("task", "draws", "solved", "reward", "last")


async def list_tasks(view: RunView, request: web.Request) -> dict[str, Any]:
    sort = choice(request, "sort", "task", SORTS)
    limit = whole_number(request, "limit", 200, low=1, high=MAX_TASKS)
    cursor = request.query.get("cursor", "")
    start = checked_number("cursor", cursor) if cursor else 0
    like = request.query.get("like", "").lower()
    only_unsolved = request.query.get("never_solved", "") in ("1", "true")
    index = await view.index()
    state = await index.update()
    tier = request.query.get("tier") or None
    rows = [{**row, "tier": view.tiers.get(row["task_id"])} for row in await index.read(_tasks)]
    never_solved = sum(row["best_solved_rate"] == 0.0 for row in rows)
    chosen = [
        row
        for row in rows
        if like in row["task_id"].lower()
        and (not only_unsolved or row["best_solved_rate"] == 0.0)
        and (tier is None or row["tier"] == tier)
    ]
    chosen.sort(key=lambda row: _key(row, sort))
    page = chosen[start : start + limit]
    missing = [row["last_place"] for row in page if row["task_id"] not in view.task_texts and row["last_place"] >= 0]
    await read_task_texts(view, await index.read(lambda found: found.rows(missing)))
    mastery = {} if view.directory is None else await asyncio.to_thread(read_mastery, view.directory)
    return {
        "tasks": [_listed(view, row) for row in page],
        "total": len(chosen),
        "never_solved": never_solved,
        "next_cursor": str(start + limit) if start + limit < len(chosen) else None,
        "tiers": [
            {
                "name": name,
                "tasks": points[-1].num_tasks,
                "is_open": points[-1].is_open,
                "graduated_share": points[-1].graduated_share,
                "rate": points[-1].rate,
                "draws": points[-1].draws,
            }
            for name, points in mastery.items()
            if points
        ],
        "mastery": {name: _curve(points) for name, points in mastery.items()},
        "index": state,
    }


def _tasks(index: ViewIndex) -> list[dict[str, Any]]:
    """One row per task. Means are over the groups that were scored."""
    columns, count = index.columns, len(index.tasks.texts)
    task = columns.task
    scored = np.isfinite(columns.reward)
    judged = np.isfinite(columns.solved)
    draws = np.bincount(task, minlength=count)
    rewards = _mean_by(task, columns.reward, scored, count)
    solved = _mean_by(task, columns.solved, judged, count)
    tokens = _mean_by(task, columns.tokens, np.isfinite(columns.tokens), count)
    dropped = np.bincount(task[columns.state == STATES.index("dropped")], minlength=count)
    best = np.full(count, np.nan)
    np.fmax.at(best, task[judged], columns.solved[judged].astype(np.float64))
    last = np.full(count, np.nan)
    # For repeated indices the last value is kept, which is the newest group.
    last[task[judged]] = columns.solved[judged]
    last_place = np.full(count, -1)
    last_place[task[scored]] = np.flatnonzero(scored)
    last_step = np.full(count, -1)
    np.maximum.at(last_step, task, columns.step)
    return [
        {
            "task_id": text,
            "draws": int(draws[at]),
            "reward_mean": float(rewards[at]),
            "solved_rate": float(solved[at]),
            "last_solved_rate": float(last[at]),
            "best_solved_rate": float(best[at]),
            "dropped": int(dropped[at]),
            "tokens": float(tokens[at]),
            "last_step": int(last_step[at]) if last_step[at] >= 0 else None,
            "last_place": int(last_place[at]),
        }
        for at, text in enumerate(index.tasks.texts)
    ]


def _listed(view: RunView, row: dict[str, Any]) -> dict[str, Any]:
    shown = {name: value for name, value in row.items() if name != "last_place"}
    return {**shown, "task_text": view.task_texts.get(row["task_id"]) or None}


def _mean_by(task: Any, values: Any, known: Any, count: int) -> Any:
    number = np.bincount(task[known], minlength=count)
    total = np.bincount(task[known], weights=values[known], minlength=count)
    with np.errstate(invalid="ignore", divide="ignore"):
        return total / number


def _key(row: dict[str, Any], sort: str) -> tuple[float, str]:
    """Hard and unknown tasks first: these need attention."""
    value = {
        "task": 0.0,
        "draws": -row["draws"],
        "solved": row["solved_rate"],
        "reward": row["reward_mean"],
        "last": -(row["last_step"] or 0),
    }[sort]
    return (-math.inf if math.isnan(value) else value), row["task_id"]


def _curve(points: list[MasteryPoint]) -> dict[str, list[Any]]:
    stride = max(1, math.ceil(len(points) / MASTERY_POINTS))
    # From the end, so that the newest is kept.
    kept = points[::-stride][::-1]
    return {
        "draws": [point.draws for point in kept],
        "rate": [point.rate for point in kept],
        "graduated": [point.graduated_share for point in kept],
    }
