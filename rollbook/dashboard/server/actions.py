"""`/api/actions`: lists what operators did to a run, and lets operators act."""

from dataclasses import asdict
from typing import Any

import msgspec
from aiohttp import web

from rollbook.contracts.admission import MAX_AUTHOR, MAX_NOTE, ActionKind, GateState, LedgerStatus
from rollbook.dashboard.run_view import RunView
from rollbook.dashboard.server.request import BadPageRequestError, ForbiddenError, read_body

LISTED = 200
"""The newest actions, on the page. Operators act rarely."""


class ActRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    kind: ActionKind
    author: str
    target: str = ""
    sample: int | None = None
    note: str = ""


async def list_actions(view: RunView, request: web.Request) -> dict[str, Any]:
    target = request.query.get("target") or None
    status = await view.ledger.status()
    start = max(0, status.actions - LISTED) if target is None else 0
    found = await view.ledger.actions(start=start, limit=LISTED, target=target)
    return {"actions": [asdict(action) for action in reversed(found)], **action_state(status)}


def action_state(status: LedgerStatus | None) -> dict[str, Any]:
    """What operators have set: pause, drain, quarantine, and a requested checkpoint."""
    return {
        "gate": None if status is None else status.gate,
        "paused": status is not None and status.gate is GateState.PAUSED,
        "draining": status is not None and status.gate is GateState.DRAINING,
        "checkpoint_requested": None if status is None else status.checkpoint_requested,
        "quarantined": () if status is None else status.quarantined,
        "count": 0 if status is None else status.actions,
    }


async def act(view: RunView, request: web.Request) -> dict[str, Any]:
    """The caller has checked that an operator sent the request."""
    wanted = await read_body(request, ActRequest)
    texts = (wanted.author, wanted.target, wanted.note)
    if any("\x00" in text for text in texts) or len(wanted.author) > MAX_AUTHOR or len(wanted.note) > MAX_NOTE:
        raise BadPageRequestError(
            f"an author has at most {MAX_AUTHOR} characters and a note {MAX_NOTE}; neither has zero bytes"
        )
    if view.run.act is None or wanted.kind is ActionKind.DRAINED:
        raise ForbiddenError(f"the action {wanted.kind} is not possible here")
    done = await view.run.act(
        wanted.kind, author=wanted.author, target=wanted.target, sample=wanted.sample, note=wanted.note
    )
    return asdict(done)
