"""Parses posted groups: from the body of a request to the JSON that is stored and served in a batch.

A well-formed body is decoded once, with types, and stored as it was sent, so that every digit of every number survives. A body that
the typed decoder rejects is parsed again by the lax pydantic model, which answers 200 or 422 exactly as the original server does.
"""

import json
import math
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, UnsetType
from pydantic import ValidationError

from rollbook.contracts.decoding import TOO_DEEP, is_too_deep, json_decoder
from rollbook.contracts.group import GroupOutcome
from rollbook.contracts.group_codec import payload_digest
from rollbook.ledger.atropos.codec import NOT_TRAINED
from rollbook.ledger.atropos.models import FIELDS, InvalidBodyError, ScoredData, check_group, invalid_body

LARGEST_INT = 2**63 - 1
MAX_ERRORS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class PostedGroup:
    """A group that can be stored: its JSON with all fields, and what the ledger must know about it."""

    payload: bytes
    digest: str
    size: int
    """Number of sequences."""
    env_id: int | None
    outcome: GroupOutcome


class _Message(msgspec.Struct):
    role: Any
    content: Any


Ints = list[list[int]]
Floats = list[list[float]] | UnsetType | None


class _TypedGroup(msgspec.Struct, forbid_unknown_fields=True):
    """The fields of `ScoredData`, strictly typed. UNSET means that the field is missing in the body."""

    tokens: Ints
    masks: Ints
    scores: list[float]
    advantages: Floats = UNSET
    ref_logprobs: Floats = UNSET
    messages: list[list[_Message]] | UnsetType | None = UNSET
    generation_params: dict[str, Any] | UnsetType | None = UNSET
    inference_logprobs: Floats = UNSET
    overrides: list[dict[str, Any]] | UnsetType | None = UNSET
    group_overrides: dict[str, Any] | UnsetType | None = UNSET
    images: Any = UNSET
    env_id: Annotated[int, msgspec.Meta(ge=-LARGEST_INT, le=LARGEST_INT)] | UnsetType | None = UNSET
    distill_token_ids: list[list[list[int]]] | UnsetType | None = UNSET
    distill_logprobs: list[list[list[float]]] | UnsetType | None = UNSET
    policy_version: int | list[int] | UnsetType | None = UNSET


_DECODER = json_decoder(_TypedGroup)
_LIST_DECODER = json_decoder(list[msgspec.Raw])


def read_group(body: bytes) -> PostedGroup:
    """Raises `InvalidBodyError` when the body is not a group."""
    try:
        return _read_typed(body)
    except (ValueError, RecursionError):
        return _read_lax(read_json(body), ())


def read_groups(body: bytes) -> list[PostedGroup]:
    """Raises `InvalidBodyError` when the body is not a list of groups."""
    try:
        return [_read_typed(bytes(raw)) for raw in _LIST_DECODER.decode(body)]
    except (ValueError, RecursionError):
        found = read_json(body)
        if not isinstance(found, list):
            raise invalid_body("list_type", (), "Input should be a valid list", found) from None
        return [_read_lax(item, (at,)) for at, item in enumerate(found)]


def read_json(body: bytes) -> Any:
    """Any JSON value. Raises `InvalidBodyError` when the body is not JSON."""
    if not body:
        raise invalid_body("missing", (), "Field required")
    if is_too_deep(body):
        raise invalid_body("json_invalid", (), f"JSON decode error: {TOO_DEEP}", {})
    try:
        return json.loads(body)
    except json.JSONDecodeError as error:
        raise invalid_body("json_invalid", (error.pos,), f"JSON decode error: {error.msg}", {}) from None
    except (ValueError, RecursionError) as error:
        raise invalid_body("json_invalid", (), f"JSON decode error: {error}", {}) from None


def _read_typed(body: bytes) -> PostedGroup:
    """Raises `ValueError` (msgspec's errors are such) for a body that only the lax model can judge."""
    group = _DECODER.decode(body)
    if [len(row) for row in group.tokens] != [len(row) for row in group.masks]:
        raise ValueError("tokens and masks have different lengths")
    missing = b"".join(b',"%s":null' % name.encode() for name in FIELDS if getattr(group, name) is UNSET)
    env_id = None if group.env_id is UNSET else group.env_id
    payload = b"".join((memoryview(body.strip())[:-1], missing, b"}"))
    return _posted(payload, group.tokens, group.masks, group.scores, env_id)


def _read_lax(found: Any, where: tuple[str | int, ...]) -> PostedGroup:
    try:
        group = ScoredData.model_validate(found, from_attributes=True)
    except ValidationError as error:
        raise invalid_fields(error, where) from None
    check_group(group, where)
    if group.env_id is not None and abs(group.env_id) > LARGEST_INT:
        raise invalid_body(
            "int_parsing_size", (*where, "env_id"), "no environment has an id this large", str(group.env_id)
        )
    fields = {name: getattr(group, name) for name in FIELDS}
    if group.policy_version is not None:
        fields["policy_version"] = group.policy_version
    try:
        payload = json.dumps(fields, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()
    except (ValueError, RecursionError):
        raise invalid_body(
            "json_invalid", where, "the body holds text or nesting that cannot be sent again as JSON"
        ) from None
    return _posted(payload, group.tokens, group.masks, group.scores, group.env_id)


def invalid_fields(error: ValidationError, where: tuple[str | int, ...] = ()) -> InvalidBodyError:
    """A validation error of pydantic in the form that clients of the original server expect."""
    if error.error_count() > MAX_ERRORS:
        # A hostile body can have one for each of its values; the list of all would take seconds.
        return invalid_body("too_many_errors", where, f"the body has {error.error_count()} invalid values")
    return InvalidBodyError(
        *(
            {
                "type": found["type"],
                "loc": ["body", *where, *found["loc"]],
                "msg": found["msg"],
                "input": found["input"],
            }
            for found in error.errors(include_url=False, include_context=False)
        )
    )


def _posted(payload: bytes, tokens: Ints, masks: Ints, scores: list[float], env_id: int | None) -> PostedGroup:
    size = len(tokens)
    trained = sum(len(mask) - mask.count(NOT_TRAINED) for mask in masks)
    mean, std = _mean_and_std(scores)
    outcome = GroupOutcome(
        num_samples=size,
        num_scorable=len(scores),
        reward_mean=mean,
        reward_std=std,
        solved_rate=None,
        truncated_rate=0.0,
        mean_turns=0.0,
        mean_response_tokens=trained / size if size else 0.0,
        seconds=0.0,
    )
    return PostedGroup(payload=payload, digest=payload_digest(payload), size=size, env_id=env_id, outcome=outcome)


def _mean_and_std(scores: list[float]) -> tuple[float | None, float | None]:
    num = len(scores)
    try:
        mean = math.fsum(scores) / num
        return mean, math.sqrt(math.fsum((score - mean) ** 2 for score in scores) / (num - 1)) if num > 1 else None
    except (OverflowError, ZeroDivisionError):
        return None, None
