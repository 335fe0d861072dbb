"""`/api/groups`, `/api/groups/ID` and `/api/groups/ID/tokens`: the rollout browser."""

import asyncio
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from aiohttp import web
from numpy.typing import NDArray

from rollbook.contracts.errors import NotFoundError, RollbookError
from rollbook.contracts.group import GroupId, PromptGroup
from rollbook.contracts.group_codec import decode_payload
from rollbook.contracts.trajectory import SCORE_PREFIX, RolloutSample
from rollbook.dashboard.index.filters import GroupFilter
from rollbook.dashboard.index.follower import FollowedIndex
from rollbook.dashboard.index.index import ViewIndex
from rollbook.dashboard.run_view import RunView
from rollbook.dashboard.server.request import BadPageRequestError, checked_number, whole_number
from rollbook.dashboard.server.task_texts import plain_text, read_task_texts
from rollbook.dashboard.source import GroupRow
from rollbook.telemetry.token_records import TokenRecord, read_token_record

PAGE_GROUPS = 50
MAX_GROUPS = 500
SEARCHED_GROUPS = 300
"""Payloads that one text search reads. The next page continues."""
SEARCHED_BYTES = 64 << 20
MAX_TOKENS = 1 << 20


async def list_groups(view: RunView, request: web.Request) -> dict[str, Any]:
    wanted = GroupFilter.parse(request.query)
    limit = whole_number(request, "limit", PAGE_GROUPS, low=1, high=MAX_GROUPS)
    cursor = request.query.get("cursor", "")
    after = None if not cursor else checked_number("cursor", cursor)
    index = await view.index()
    state = await index.update()
    total, places = await index.read(lambda found: _after(found, wanted, after))
    searched = None
    if wanted.text is None:
        page, rest = places[:limit], len(places) > limit
        rows = await index.read(lambda found: found.rows(page))
    else:
        rows, page, rest = await _search(view, index, places, wanted.text, limit)
        searched = {"groups": len(page), "is_complete": not rest}
    await read_task_texts(view, rows)
    histogram, facets = await index.read(lambda found: (found.reward_histogram(wanted), found.facets(wanted)))
    return {
        "groups": [listed(view, row) for row in rows],
        "total": total,
        "total_all": state.indexed,
        "next_cursor": str(int(page[-1])) if rest and len(page) else None,
        "histogram": histogram,
        "facets": facets,
        "searched": searched,
        "index": state,
    }


def _after(index: ViewIndex, wanted: GroupFilter, after: int | None) -> tuple[int, NDArray[np.int64]]:
    """The number of selected groups, and the places of those behind the place `after`, in the filter's order."""
    places = index.list_of(wanted)
    if after is None:
        return len(places), places
    return len(places), index.list_after(wanted, after)


async def _search(
    view: RunView, index: FollowedIndex, places: NDArray[np.int64], text: str, limit: int
) -> tuple[list[GroupRow], NDArray[np.int64], bool]:
    """The groups with this text in their ids or messages, the places that were searched, and whether there are more."""
    found: list[GroupRow] = []
    searched = read = 0
    needle = text.lower()
    for row in await index.read(lambda one: one.rows(places[:SEARCHED_GROUPS])):
        searched += 1
        is_match = needle in row.group_id.lower() or needle in (row.drop_reason or "").lower()
        if not is_match and row.has_payload:
            read += row.payload_bytes
            is_match = await _has_text(view, row.group_id, needle)
        if is_match:
            found.append(row)
        if len(found) == limit or read > SEARCHED_BYTES:
            break
    return found, places[:searched], len(places) > searched


async def _has_text(view: RunView, group_id: str, needle: str) -> bool:
    [payload] = await view.ledger.payloads(group_id)
    if payload is None:
        return False

    def search() -> bool:
        try:
            group = decode_payload(payload, GroupId(group_id))
        except RollbookError:
            return False
        texts = (plain_text(message.get("content")) for sample in group.samples for message in sample.messages or ())
        return any(needle in text.lower() for text in texts)

    return await asyncio.to_thread(search)


def listed(view: RunView, row: GroupRow) -> dict[str, Any]:
    outcome = row.outcome
    return {
        "sequence": row.sequence,
        "group_id": row.group_id,
        "task_id": row.task_id,
        "task_text": view.task_texts.get(row.task_id) or None,
        "tier": view.tiers.get(row.task_id),
        "draw": row.draw,
        "state": row.state,
        "drop_kind": row.drop_kind,
        "drop_reason": row.drop_reason,
        "step": row.step,
        "lag": row.lag,
        "opened_at": row.opened_at,
        "attempt": row.attempt,
        "origin": row.origin,
        "producer": row.producer,
        "unusable": row.unusable,
        "has_payload": row.has_payload,
        "num_samples": 0 if outcome is None else outcome.num_samples,
        "reward_mean": None if outcome is None else outcome.reward_mean,
        "reward_std": None if outcome is None else outcome.reward_std,
        "solved_rate": None if outcome is None else outcome.solved_rate,
        "tokens": None if outcome is None else outcome.mean_response_tokens,
        "turns": None if outcome is None else outcome.mean_turns,
        "seconds": None if outcome is None else outcome.seconds,
        "truncated_rate": None if outcome is None else outcome.truncated_rate,
        "samples": [] if outcome is None else [sample._asdict() for sample in outcome.samples],
    }


async def show_group(view: RunView, request: web.Request) -> dict[str, Any]:
    group_id = request.match_info["group"]
    history = await view.ledger.explain(group_id)
    row, outcome = history.group, history.group.outcome
    payload, problem, group = await _payload(view, row)
    wanted = GroupFilter.parse(request.query)
    index = await view.index()
    await index.update()
    neighbours = await index.read(lambda found: _neighbours(found, wanted, group_id))
    return {
        "group": listed(view, row),
        **neighbours,
        "sentences": history.sentences,
        "moves": history.moves,
        "oldest_version": row.oldest_version,
        "admission_version": row.admission_version,
        "publications": row.publications,
        "versions": await view.version_of(row.publications),
        "unusable": row.unusable,
        "attempts": row.attempt,
        "invalid_causes": {} if outcome is None else outcome.invalid_causes,
        "retried_samples": 0 if outcome is None else outcome.retried_samples,
        "payload": payload,
        "payload_problem": problem,
        "samples": [] if group is None else _samples(view, group),
        "divergence": {"turn": None if group is None else _divergence(group)},
    }


async def _payload(view: RunView, row: GroupRow) -> tuple[str, str | None, PromptGroup | None]:
    """`stored`, `deleted`, `never` or `damaged`; the damage in words; the group."""
    try:
        [payload] = await view.ledger.payloads(row.group_id)
        if payload is None:
            return ("deleted" if row.payload_bytes else "never"), None, None
        return "stored", None, await asyncio.to_thread(decode_payload, payload, GroupId(row.group_id))
    except RollbookError as error:
        return "damaged", str(error), None


def _neighbours(index: ViewIndex, wanted: GroupFilter, group_id: str) -> dict[str, Any]:
    places, place = index.list_of(wanted), index.place_of(group_id)
    at = np.flatnonzero(places == (-1 if place is None else place))
    if not len(at):
        return {"previous": None, "next": None, "position": None, "total": len(places)}
    position = int(at[0])
    near = {name: position + offset for name, offset in (("previous", -1), ("next", 1))}
    ids = {
        name: index.rows([int(places[other])])[0].group_id if 0 <= other < len(places) else None
        for name, other in near.items()
    }
    return {**ids, "position": position, "total": len(places)}


def _samples(view: RunView, group: PromptGroup) -> list[dict[str, Any]]:
    advantages = view.run.advantages(group)
    return [
        {
            "sample": number,
            "reward": sample.reward,
            "solved": sample.solved,
            "end": sample.finish_reason,
            "invalid_cause": sample.invalid_cause,
            "num_tokens": sample.num_tokens,
            "num_trained": sample.num_trained,
            "metrics": {name: value for name, value in sample.metrics.items() if not name.startswith(SCORE_PREFIX)},
            "rewards": {
                name.removeprefix(SCORE_PREFIX): value
                for name, value in sample.metrics.items()
                if name.startswith(SCORE_PREFIX)
            },
            "facts": sample.facts,
            "advantage": None if advantages is None else advantages[number],
            "teacher_gap": _teacher_gap(sample),
            "messages": None if sample.messages is None else [_message(message) for message in sample.messages],
            "sequences": len(sample.sequences),
            "turns": [
                {
                    "sequence": turn.sequence,
                    "start": turn.start,
                    "end": turn.end,
                    "seconds": turn.seconds,
                    "queue_s": turn.queue_s,
                    "generate_s": max(0.0, turn.seconds - turn.queue_s),
                    "act_s": turn.act_s,
                    "reward": reward,
                }
                for turn, reward in zip(sample.turns, _turn_rewards(sample), strict=True)
            ],
            "score_s": sample.metrics.get("reward_seconds"),
            "started_at": sample.started_at,
            "ended_at": sample.ended_at,
        }
        for number, sample in enumerate(group.samples)
    ]


def _teacher_gap(sample: RolloutSample) -> float | None:
    """Mean difference between the teacher's and the policy's logprob of a trained token. None without a teacher."""
    gaps = [
        row.teacher_logprobs[row.loss_mask] - row.logprobs[row.loss_mask]
        for row in sample.sequences
        if row.teacher_logprobs is not None
    ]
    known = np.concatenate(gaps) if gaps else np.empty(0)
    known = known[np.isfinite(known)]
    return float(known.mean()) if len(known) else None


def _turn_rewards(sample: RolloutSample) -> Sequence[float | None]:
    found = sample.turn_rewards
    return [None] * len(sample.turns) if found is None else found.tolist()


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as text. Model output is never interpreted."""
    calls = message.get("tool_calls")
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    return {
        "role": str(message.get("role", "")),
        "content": plain_text(message.get("content")),
        "reasoning": None if reasoning is None else plain_text(reasoning),
        "tool_calls": [_tool_call(call) for call in calls] if isinstance(calls, Sequence) else [],
        "tool_call_id": _optional(message.get("tool_call_id")),
        "name": _optional(message.get("name")),
    }


def _tool_call(call: Any) -> dict[str, Any]:
    if not isinstance(call, Mapping):
        return {"id": None, "name": "", "arguments": plain_text(call)}
    function = call.get("function")
    found = function if isinstance(function, Mapping) else call
    return {
        "id": _optional(call.get("id")),
        "name": str(found.get("name", "")),
        "arguments": plain_text(found.get("arguments")),
    }


def _optional(value: Any) -> str | None:
    return None if value is None else str(value)


def _divergence(group: PromptGroup) -> int | None:
    """The first turn at which the samples differ; None if there is one sample, or none differs."""
    if len(group.samples) < 2:
        return None
    answers = [
        [plain_text(message.get("content")) for message in sample.messages or () if message.get("role") == "assistant"]
        for sample in group.samples
    ]
    for turn in range(max(map(len, answers))):
        if len({texts[turn] if turn < len(texts) else None for texts in answers}) > 1:
            return turn
    return None


async def tokens(view: RunView, request: web.Request) -> dict[str, Any]:
    history = await view.ledger.explain(request.match_info["group"])
    payload, problem, group = await _payload(view, history.group)
    if group is None:
        raise NotFoundError(problem or f"the payload of group {history.group.group_id} is {payload}")
    number = whole_number(request, "sample", 0, high=len(group.samples) - 1)
    sample = group.samples[number]
    sequence = whole_number(request, "sequence", 0, high=len(sample.sequences) - 1)
    if len(sample.sequences[sequence]) > MAX_TOKENS:
        raise BadPageRequestError(f"the sequence has more than {MAX_TOKENS} tokens")
    versions = await view.version_of(history.group.publications)
    advantages = view.run.advantages(group)
    reader = await view.tokens()
    record = None
    if view.directory is not None and history.group.step is not None:
        place = (view.directory, history.group.step, history.group.group_id, number, sequence)
        record = await asyncio.to_thread(read_token_record, *place)
    row = sample.sequences[sequence]

    def build() -> dict[str, Any]:
        texts, authors = None, _authors(sample, sequence, [])
        if reader is not None:
            texts = reader.texts(row.token_ids.tolist())
            authors = _authors(sample, sequence, reader.authors(sample, sequence))
        return {
            "sample": number,
            "sequence": sequence,
            "sequences": len(sample.sequences),
            "count": len(row),
            "text": texts,
            "ids": row.token_ids.tolist(),
            "logprob": [
                value if publication >= 0 or mask else math.nan
                for value, publication, mask in zip(
                    row.logprobs.astype(np.float64).round(5).tolist(),
                    row.versions.tolist(),
                    row.loss_mask.tolist(),
                    strict=True,
                )
            ],
            "publication": row.versions.tolist(),
            "version": [versions.get(publication, -1) for publication in row.versions.tolist()],
            "author": authors,
            "mask": row.loss_mask.astype(int).tolist(),
            "teacher_logprob": None
            if row.teacher_logprobs is None
            else row.teacher_logprobs.astype(np.float64).round(5).tolist(),
            **_recorded(record, sample, sequence, None if advantages is None else advantages[number]),
        }

    return await asyncio.to_thread(build)


def _authors(sample: RolloutSample, sequence: int, spans: list[tuple[int, int, str]]) -> dict[str, Any]:
    """The author of each token, as numbers into a list of names. Without a tokenizer only the policy's tokens are known."""
    row = sample.sequences[sequence]
    names = list(dict.fromkeys([*(author for _, _, author in spans), "policy", "context"]))
    if spans:
        at = np.empty(len(row), dtype=np.int64)
        for start, end, author in spans:
            at[start:end] = names.index(author)
    else:
        at = np.where(row.loss_mask, names.index("policy"), names.index("context"))
    return {"names": names, "at": at.tolist()}


def _recorded(
    record: TokenRecord | None, sample: RolloutSample, sequence: int, advantage: float | None
) -> dict[str, Any]:
    """Per token: advantage, entropy and the trainer's logprob, where the trainer recorded them."""
    row = sample.sequences[sequence]
    if record is not None and len(record.advantage) == len(row):
        return {
            "advantage": record.advantage,
            "entropy": record.entropy,
            "trainer_logprob": record.logprob,
            "recorded_step": record.step,
        }
    flat = None if advantage is None else np.where(row.loss_mask, advantage, math.nan).tolist()
    return {"advantage": flat, "entropy": None, "trainer_logprob": None, "recorded_step": None}
