"""`/api/steps` and `/api/steps/N`: the trained steps, and what each batch was made of."""

import asyncio
import math
from collections.abc import Mapping
from typing import Any

from aiohttp import web

from rollbook.contracts.batch import BatchManifest
from rollbook.contracts.errors import NotFoundError, RollbookError
from rollbook.contracts.group import GroupId, PromptGroup, SampleOutcome
from rollbook.contracts.group_codec import decode_payload
from rollbook.contracts.trajectory import RolloutSample
from rollbook.dashboard.run_view import RunView
from rollbook.dashboard.server.request import checked_number, whole_number
from rollbook.dashboard.source import GroupTimeline

MAX_STEPS = 500
ANATOMY_GROUPS = 512
"""Groups of one batch in one response."""
DETAILED_BYTES = 8 << 20
"""Payloads that are decoded for the turns of samples, in one response."""
COLUMNS = {
    "reward": "rollout/reward",
    "solved": "rollout/accuracy",
    "lag_max": "async/version_offset_max",
    "lag_mean": "async/version_offset_mean",
    "wait_s": "perf/sample_wait_time",
    "train_s": "perf/train_time",
    "tokens": "train/tokens",
    "response_tokens": "rollout/response_len",
    "truncated": "rollout/truncated_ratio",
    "entropy": "train/entropy",
    "kl": "train/reference_kl",
    "step_kl": "train/ppo_kl",
    "loss": "train/loss",
    "grad_norm": "train/grad_norm",
    "groups": "rollout/groups",
}


async def list_steps(view: RunView, request: web.Request) -> dict[str, Any]:
    before = whole_number(request, "before", 0)
    limit = whole_number(request, "limit", 200, low=1, high=MAX_STEPS)
    series = await view.series()
    times = [] if series is None else series.step_times()
    durable = (await view.ledger.status()).durable_step
    chosen = [(step, at) for step, at in times if not before or step < before][-limit:]
    rows = []
    for step, at in reversed(chosen):
        measured = {} if series is None else series.row(step)
        row = {name: measured.get(metric) for name, metric in COLUMNS.items()}
        rows.append({"step": step, "time": at, **row, "is_durable": step <= durable})
    is_more = bool(chosen) and chosen[0][0] > (times[0][0] if times else 0)
    return {"steps": rows, "next_before": chosen[0][0] if is_more else None}


async def anatomy(view: RunView, request: web.Request) -> dict[str, Any]:
    step = checked_number("step", request.match_info["step"], low=1)
    manifest = await view.ledger.manifest(step)
    status = await view.ledger.status()
    series = await view.series()
    groups, left = [], DETAILED_BYTES
    for entry in manifest.entries[:ANATOMY_GROUPS]:
        history = await view.ledger.explain(entry.group_id)
        group = None
        if history.group.has_payload and left > history.group.payload_bytes:
            left -= history.group.payload_bytes
            group = await _decoded(view, entry.group_id)
        versions = await view.version_of(history.group.publications)
        groups.append(_group(history, group, versions, step=step, oldest_version=entry.oldest_version))
    times = [
        at
        for group in groups
        for at in (group["opened_at"], group["queued_at"], group["batched_at"], group["trained_at"])
        if at is not None
    ]
    return {
        "step": step,
        "decided_at": groups[0]["batched_at"] if groups else None,
        "trained_at": groups[0]["trained_at"] if groups else None,
        "previous": step - 1 if step > 1 else None,
        "next": step + 1 if await _is_decided(view, step + 1, status.acknowledged_step) else None,
        "digest": manifest.digest,
        "num_groups": len(manifest.entries),
        "truncated": len(manifest.entries) > ANATOMY_GROUPS,
        "metrics": {} if series is None else series.row(step),
        "begin": min(times, default=None),
        "end": max(times, default=None),
        "groups": groups,
    }


async def _is_decided(view: RunView, step: int, acknowledged: int) -> bool:
    if step <= acknowledged:
        return True
    try:
        found: BatchManifest = await view.ledger.manifest(step)
    except NotFoundError:
        return False
    return found.step == step


async def _decoded(view: RunView, group_id: str) -> PromptGroup | None:
    [payload] = await view.ledger.payloads(group_id)
    if payload is None:
        return None
    try:
        return await asyncio.to_thread(decode_payload, payload, GroupId(group_id))
    except RollbookError:
        return None  # the page of the group says why


def _group(
    history: GroupTimeline,
    group: PromptGroup | None,
    versions: Mapping[int, int],
    *,
    step: int,
    oldest_version: int | None,
) -> dict[str, Any]:
    row, outcome = history.group, history.group.outcome
    at = {move.to_state: move.at for move in history.moves}
    queued_at, batched_at, trained_at = at.get("queued"), at.get("batched"), at.get("trained")
    samples = []
    for number, sample in enumerate(() if outcome is None else outcome.samples):
        played = group.samples[number] if group is not None and number < len(group.samples) else None
        samples.append(_sample(number, sample, played, versions, queued_at=queued_at, batched_at=batched_at))
    return {
        "group_id": row.group_id,
        "task_id": row.task_id,
        "state": row.state,
        "reward_mean": None if outcome is None else outcome.reward_mean,
        "lag": None if oldest_version is None else step - 1 - oldest_version,
        "oldest_version": oldest_version,
        "unusable": row.unusable,
        "opened_at": row.opened_at,
        "queued_at": queued_at,
        "batched_at": batched_at,
        "trained_at": trained_at,
        "samples": samples,
    }


def _sample(
    number: int,
    outcome: SampleOutcome,
    played: RolloutSample | None,
    versions: Mapping[int, int],
    *,
    queued_at: float | None,
    batched_at: float | None,
) -> dict[str, Any]:
    start, seconds = _finite(outcome.started_at), _finite(outcome.seconds)
    finish = None if start is None or seconds is None else start + seconds
    parts = [] if start is None or finish is None else _parts(start, finish, played)
    if finish is not None and queued_at is not None and queued_at > finish:
        parts.append(("wait", finish, queued_at))
    if queued_at is not None and batched_at is not None:
        parts.append(("queue", queued_at, batched_at))
    sampled_by = {p for row in played.sequences for p in row.trained_publications()} if played is not None else set()
    return {
        "sample": number,
        "reward": outcome.reward,
        "solved": outcome.solved,
        "tokens": outcome.tokens,
        "turns": outcome.turns,
        "end": outcome.end,
        "start": start,
        "finish": finish,
        "parts": parts,
        "versions": sorted(versions.get(publication, publication) for publication in sampled_by),
    }


def _parts(start: float, finish: float, played: RolloutSample | None) -> list[tuple[str, float, float]]:
    """What a sample did, one part after the other. Only durations are recorded, so each part follows the one before."""
    parts: list[tuple[str, float, float]] = []
    at = start
    for turn in () if played is None else played.turns:
        generate_s = max(0.0, turn.seconds - turn.queue_s)
        for name, seconds in (("wait", turn.queue_s), ("generate", generate_s), ("act", turn.act_s)):
            if seconds > 0 and math.isfinite(seconds):
                parts.append((name, at, at + seconds))
                at += seconds
    score_s = 0.0 if played is None else played.metrics.get("reward_seconds", 0.0)
    if finish > at:
        score_at = max(at, finish - score_s)
        if score_at > at:
            parts.append(("other", at, score_at))
        if finish > score_at:
            parts.append(("score", score_at, finish))
    return parts


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
