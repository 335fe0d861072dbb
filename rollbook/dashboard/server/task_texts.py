"""What each task asks, for the lists of groups and tasks, in which ids alone tell nothing apart.

The ledger has only the id of a task. Its text is the first message of a user in a stored group of the task; it is read once.
"""

import asyncio
import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import accumulate
from typing import Any

from rollbook.contracts.errors import RollbookError
from rollbook.contracts.group import GroupId, PromptGroup
from rollbook.contracts.group_codec import decode_payload
from rollbook.dashboard.run_view import RunView
from rollbook.dashboard.source import GroupRow

KEPT_TASKS = 10_000
KEPT_CHARS = 1000
READ_GROUPS, READ_BYTES = 50, 8 << 20
"""Payloads that are read for one request. The next one reads more."""
MAX_CHARS = 10 << 20
"""Text of one message. A longer one is cut, with a note."""


async def read_task_texts(view: RunView, rows: Iterable[GroupRow]) -> None:
    """Read the texts of tasks that `view.task_texts` lacks, from these groups. A task without a text gets an empty one."""
    known = view.task_texts
    missing = list({row.task_id: row for row in rows if row.has_payload and row.task_id not in known}.values())
    missing = missing[:READ_GROUPS]
    sizes = accumulate(row.payload_bytes for row in missing)
    chosen = [row for row, size in zip(missing, sizes, strict=True) if size <= READ_BYTES] or missing[:1]
    if not chosen:
        return
    with suppress(RollbookError):  # the lists are useful without texts
        payloads = await view.ledger.payloads(*(row.group_id for row in chosen))
        known.update(await asyncio.to_thread(_texts, chosen, payloads))
    for task_id in list(known)[: max(0, len(known) - KEPT_TASKS)]:
        del known[task_id]


def _texts(rows: Sequence[GroupRow], payloads: Sequence[bytes | None]) -> dict[str, str]:
    found: dict[str, str] = {}
    for row, payload in zip(rows, payloads, strict=True):
        found[row.task_id] = ""
        with suppress(RollbookError):  # the page of a group reports that its payload is damaged
            if payload is not None:
                found[row.task_id] = _task_text(decode_payload(payload, GroupId(row.group_id)))
    return found


def _task_text(group: PromptGroup) -> str:
    messages = next((sample.messages for sample in group.samples if sample.messages), ())
    of_user = (message for message in messages if message.get("role") == "user")
    first = next(of_user, messages[0] if messages else {})
    text = plain_text(first.get("content")).strip()
    return text if len(text) <= KEPT_CHARS else f"{text[:KEPT_CHARS]}…"


def plain_text(value: Any) -> str:
    """The content of a message. Parts that are text are joined, everything else is shown as JSON."""
    if value is None:
        return ""
    if isinstance(value, Sequence) and not isinstance(value, str):
        parts = [
            part["text"] if isinstance(part, Mapping) and isinstance(part.get("text"), str) else plain_text(part)
            for part in value
        ]
        value = "\n".join(parts)
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= MAX_CHARS else f"{text[:MAX_CHARS]}\n[{len(text) - MAX_CHARS} more characters]"
