"""`/api/fleet`, `/api/health` and `/api/config`: the processes of a run, what they reported, and its settings."""

import asyncio
import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

from rollbook.contracts.errors import RollbookError
from rollbook.dashboard.process_files import (
    described,
    last_events,
    last_output,
    read_events,
    read_processes,
    read_resumes,
)
from rollbook.dashboard.run_view import RunView
from rollbook.dashboard.timeline import bounds, read_lanes

RECENT_S = 60.0
"""Replicas are described by what they did in this time before the end of the record."""
MAX_FAILURES = 50
MAX_STACKS = 10
MAX_CAUSE = 2000


async def fleet(view: RunView, _: web.Request) -> dict[str, Any]:
    try:
        producers = await view.ledger.producers()
    except RollbookError:
        producers = ()
    if view.directory is None:
        return {"processes": [], "replicas": [], "workers": [], "producers": producers, "gauges": {}}
    metrics = await view.metrics()
    found = await asyncio.to_thread(_fleet, view.directory)
    return {**found, "producers": producers, "gauges": metrics.gauges}


def _fleet(run_dir: Path) -> dict[str, Any]:
    newest = last_events(run_dir)
    processes = read_processes(run_dir)
    rows = []
    for process in processes:
        event = newest.get(process.name)
        rows.append(
            {
                "name": process.name,
                "role": process.role,
                "pid": process.pid,
                "state": process.state,
                "restarts": process.restarts,
                "ready": process.ready,
                "alive": process.alive,
                "memory_bytes": process.memory_bytes,
                "cpu_s": process.cpu_s,
                "node": process.node,
                "last_event": None if event is None else {"time": event["time"], "event": event["event"]},
            }
        )
    workers: dict[Any, dict[str, Any]] = {}
    for event in read_events(run_dir, levels=("info",), name="rollout.worker_ready"):
        if event.get("worker") not in workers:
            pid = event.get("pid")
            workers[event.get("worker")] = {
                "worker": event.get("worker"),
                "pid": pid,
                "ready_at": event["time"],
                "alive": isinstance(pid, int) and Path(f"/proc/{pid}").exists(),
            }
    addresses = _addresses(run_dir)
    return {
        "processes": rows,
        "replicas": _replicas(run_dir, addresses, {process.name: process.address for process in processes}),
        "workers": sorted(workers.values(), key=lambda worker: str(worker["worker"])),
        "addresses": addresses,
    }


def _addresses(run_dir: Path) -> dict[str, str]:
    try:
        found = json.loads((run_dir / "addresses.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return {str(name): str(url) for name, url in found.items()} if isinstance(found, dict) else {}


def _replicas(run_dir: Path, addresses: dict[str, str], joined: dict[str, str | None]) -> list[dict[str, Any]]:
    """What each policy server did in the last minute of the record. `joined`: addresses of those that joined the run."""
    limits = bounds(run_dir)
    if limits is None:
        return []
    end = limits[1]
    begin = max(limits[0], end - RECENT_S)
    lanes, _ = read_lanes(run_dir, begin, end, process="policy*")
    urls = addresses.get("policy", "").split(",")
    own = {f"policy-{number}" if number else "policy": url for number, url in enumerate(urls)}
    found = []
    for lane in (lane for lane in lanes if lane.kind == "policy"):
        generating = [span for span in lane.spans if span[2] == "policy.generate"]
        busy_s = sum(min(stop, end) - max(start, begin) for start, stop, *_ in generating)
        tokens = sum(fields.get("tokens", 0) for *_, fields in generating)
        publications = [fields.get("publication") for *_, fields in lane.spans]
        whole_s = max(end - begin, 1e-9)
        found.append(
            {
                "name": lane.id,
                "url": joined.get(lane.id) or own.get(lane.id) or None,
                "publication": max((p for p in publications if isinstance(p, int)), default=None),
                "busy_share": min(1.0, busy_s / whole_s) if generating else None,
                "tokens_per_s": tokens / whole_s if generating else None,
                "last_generate": max((stop for _, stop, *_ in generating), default=None),
            }
        )
    return found


async def health(view: RunView, _: web.Request) -> dict[str, Any]:
    if view.directory is None:
        return {
            "events": [],
            "failures": [],
            "stderr": [],
            "stacks": [],
            "restarts": [],
            "silent": [],
            "skipped_lines": {},
        }
    found = await asyncio.to_thread(_health, view.directory)
    series = await view.series()
    return {**found, "skipped_lines": {} if series is None else {"metrics.jsonl": series.skipped}}


def _health(run_dir: Path) -> dict[str, Any]:
    events = read_events(run_dir)
    newest = last_events(run_dir)
    now = time.time()
    return {
        "events": [described(event) for event in events],
        "failures": _failures(run_dir),
        "stderr": [{"process": name, "lines": lines} for name, lines in last_output(run_dir)],
        "stacks": [
            {"time": event["time"], "process": str(event.get("process")), "text": str(event["stack"])[:20_000]}
            for event in events
            if "stack" in event
        ][:MAX_STACKS],
        "restarts": [
            {"time": event["time"], "process": str(event.get("process")), "code": event.get("code")}
            for event in events
            if event["event"] == "run.process_died"
        ],
        "silent": [
            {"process": name, "silent_s": round(now - event["time"], 1), "event": event["event"]}
            for name, event in newest.items()
        ],
    }


def _failures(run_dir: Path) -> list[dict[str, Any]]:
    """The first failed episodes by cause."""
    causes: Counter[str] = Counter()
    files: dict[str, str] = {}
    for path in sorted((run_dir / "failures").glob("*.json"))[:MAX_FAILURES]:
        try:
            written = str(json.loads(path.read_text(encoding="utf-8"))["cause"])[:MAX_CAUSE]
        except (OSError, ValueError, KeyError, TypeError):
            continue  # cut off by a kill
        # Names of files that are not UTF-8 contain surrogates, which cannot be sent.
        cause = written.encode(errors="replace").decode()
        causes[cause] += 1
        files.setdefault(cause, f"failures/{path.name}")
    return [{"cause": cause, "count": count, "file": files[cause]} for cause, count in causes.most_common()]


async def config(view: RunView, _: web.Request) -> dict[str, Any]:
    sections, toml = await asyncio.to_thread(view.run.config)
    resumes = [] if view.directory is None else await asyncio.to_thread(read_resumes, view.directory)
    last = resumes[-1]["changed"] if resumes else {}
    return {
        "sections": [
            {
                "name": section.name,
                "fields": [
                    {**msgspec.structs.asdict(field), "resumed_from": (last.get(field.path) or [None])[0]}
                    for field in section.fields
                ],
            }
            for section in sections
        ],
        "toml": toml,
        "resumes": resumes,
    }
