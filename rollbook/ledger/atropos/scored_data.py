"""A posted group: from the bytes of a request to the bytes of a batch, without building a list of its tokens.

What arrives is kept as it is, its fields in the order of the model and the missing ones null, so every digit of every number
survives. The quick way only looks: it takes a body whose fields are plainly of the right kind. Whatever it does not take goes the
slow way, through the lax model, which gives the same 200 or 422 as the original.
"""

import json
import math
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from pydantic import ValidationError

from rollbook.contracts.group import GroupOutcome
from rollbook.contracts.group_codec import payload_digest
from rollbook.ledger.atropos.models import FIELDS, Refusal, ScoredData, refusal, refuse_impossible
from rollbook.ledger.atropos.number_rows import find_float_rows, find_int_rows, find_mask_rows

NULL = b"null"
Text = bytes | memoryview
TOKENS_KEY, MASKS_KEY, LOGPROBS_KEY = b'"tokens":', b'"masks":', b'"inference_logprobs":'
TOKENS_MARK, MASKS_MARK, LOGPROBS_MARK = (b"%d" % (10**30 + secrets.randbelow(10**30)) for _ in range(3))
"""Stand for lists that were looked at apart. Chosen anew in each process."""
COMMA, MINUS, BRACKET, EXPONENT = b",-]e"
LARGEST_INT = 2**63 - 1
_KEYS = [(name, b'%s"%s":' % (b"," if at else b"{", name.encode())) for at, name in enumerate(FIELDS)]


@dataclass(frozen=True, slots=True, kw_only=True)
class PostedGroup:
    """A group that can be stored: canonical JSON, and what the ledger must know of it."""

    payload: bytes
    digest: str
    size: int
    """Sequences."""
    env_id: int | None
    outcome: GroupOutcome


_NOTHING = msgspec.Raw(NULL)


class _Message(msgspec.Struct):
    role: msgspec.Raw
    content: msgspec.Raw


class _Envelope(msgspec.Struct):
    """The fields closed, except where a look inside costs nothing."""

    tokens: msgspec.Raw
    masks: msgspec.Raw
    scores: list[float]
    advantages: msgspec.Raw = _NOTHING
    ref_logprobs: msgspec.Raw = _NOTHING
    messages: msgspec.Raw = _NOTHING
    generation_params: msgspec.Raw = _NOTHING
    inference_logprobs: msgspec.Raw = _NOTHING
    overrides: msgspec.Raw = _NOTHING
    group_overrides: msgspec.Raw = _NOTHING
    images: msgspec.Raw = _NOTHING
    env_id: int | None = None
    distill_token_ids: msgspec.Raw = _NOTHING
    distill_logprobs: msgspec.Raw = _NOTHING


class _NotPlainError(Exception):
    """Perhaps right, perhaps wrong: the slow way knows."""


_ONE = msgspec.json.Decoder(_Envelope)
_MANY = msgspec.json.Decoder(list[_Envelope])
_KINDS: dict[str, msgspec.json.Decoder[Any]] = {
    "messages": msgspec.json.Decoder(list[list[_Message]]),
    "generation_params": msgspec.json.Decoder(dict[str, msgspec.Raw]),
    "overrides": msgspec.json.Decoder(list[dict[str, msgspec.Raw]]),
    "group_overrides": msgspec.json.Decoder(dict[str, msgspec.Raw]),
    "distill_token_ids": msgspec.json.Decoder(list[list[list[int]]]),
    "distill_logprobs": msgspec.json.Decoder(list[list[list[float]]]),
}
_ROWS_OF_FLOATS = msgspec.json.Decoder(list[list[float]])
_FREE_FORM = ("messages", "generation_params", "overrides", "group_overrides", "images")
_SELDOM = (*_FREE_FORM, "distill_token_ids", "distill_logprobs")
_PER_TOKEN = ("advantages", "ref_logprobs", "inference_logprobs")


def read_group(body: bytes) -> PostedGroup:
    """Raises `Refusal` when the body is no group."""
    try:
        return _quick_group(body) or _plain_group(_decoded(body))
    except (_NotPlainError, msgspec.MsgspecError, RecursionError):
        return _lax_group(_json(body), ())


def read_groups(body: bytes) -> list[PostedGroup]:
    """All of them, or `Refusal`."""
    try:
        _require_text(body)
        return [_plain_group(envelope) for envelope in _MANY.decode(body)]
    except (_NotPlainError, msgspec.MsgspecError, RecursionError):
        found = _json(body)
        if not isinstance(found, list):
            raise refusal("list_type", (), "Input should be a valid list", found) from None
        return [_lax_group(item, (at,)) for at, item in enumerate(found)]


def read_message(body: bytes) -> Any:
    """Any JSON value, or `Refusal`."""
    return _json(body)


def _require_text(body: bytes) -> None:
    """The closed fields are not looked into, so their letters are checked here."""
    if not body.isascii():
        try:
            body.decode()
        except UnicodeDecodeError:
            raise _NotPlainError from None


def _quick_group(body: bytes) -> PostedGroup | None:
    """The usual body: its lists of numbers are looked at where they lie, and only the rest is read as JSON. None: not that plain.

    A number that nobody else could have written stands for each list meanwhile, so that a list inside a text or an inner object is
    never taken for one of the group.
    """
    tokens = find_int_rows(body, _value_of(body, TOKENS_KEY, 0))
    if tokens is None:
        return None
    at = _value_of(body, MASKS_KEY, tokens.end)
    masks = find_mask_rows(body, at, tokens) or find_int_rows(body, at)
    if masks is None or tokens.lengths != masks.lengths:
        return None
    places = [(tokens.begin, tokens.end, TOKENS_MARK), (masks.begin, masks.end, MASKS_MARK)]
    at = _value_of(body, LOGPROBS_KEY, masks.end)
    logprobs = None if at < 0 else find_float_rows(body, at)
    if logprobs is not None:
        places.append((*logprobs, LOGPROBS_MARK))
    view, rest, after = memoryview(body), list[Text](), 0
    for begin, end, mark in places:
        rest += (view[after:begin], mark)
        after = end
    found = _decoded(b"".join((*rest, view[after:])))
    if bytes(found.tokens) != TOKENS_MARK or bytes(found.masks) != MASKS_MARK:
        return None
    if logprobs is not None and bytes(found.inference_logprobs) != LOGPROBS_MARK:
        return None
    parts: dict[str, Text] = {"tokens": view[tokens.begin : tokens.end], "masks": view[masks.begin : masks.end]}
    if logprobs is not None:
        parts["inference_logprobs"] = view[logprobs[0] : logprobs[1]]
    return _plain_rest(found, parts, lengths=tokens.lengths, num_masked=masks.num_negative)


def _value_of(body: bytes, key: bytes, start: int) -> int:
    """Where the value of a key begins, -1 when there is none."""
    at = body.find(key, start)
    if at < 0:
        return -1
    at += len(key)
    return at + 1 if body[at : at + 1] == b" " else at


def _decoded(body: bytes) -> _Envelope:
    _require_text(body)
    return _ONE.decode(body)


def _plain_group(found: _Envelope) -> PostedGroup:
    tokens, masks = bytes(found.tokens), bytes(found.masks)
    lengths, _ = _rows_of_ints(tokens)
    mask_lengths, num_masked = _rows_of_ints(masks)
    if lengths != mask_lengths:
        raise _NotPlainError
    return _plain_rest(found, {"tokens": tokens, "masks": masks}, lengths=lengths, num_masked=num_masked)


def _plain_rest(found: _Envelope, parts: dict[str, Text], *, lengths: list[int], num_masked: int) -> PostedGroup:
    """Check and add the fields that are not among the parts yet."""
    parts["scores"] = msgspec.json.encode(found.scores)
    if found.env_id is not None and abs(found.env_id) > LARGEST_INT:
        raise _NotPlainError
    if found.env_id is not None:
        parts["env_id"] = b"%d" % found.env_id
    for name in _PER_TOKEN:
        given = getattr(found, name)
        raw = NULL if given is _NOTHING or name in parts else bytes(given)
        if raw != NULL:
            parts[name] = raw
            _check_floats(raw)
    for name in _SELDOM:
        given = getattr(found, name)
        if given is _NOTHING:
            continue
        raw = bytes(given)
        if raw == NULL:
            continue
        parts[name] = raw
        if name in _KINDS:
            _KINDS[name].decode(raw)
        if name in _FREE_FORM:
            _refuse_overflow(raw)
    # The mark of a token that is not trained is -100; no token has a negative id.
    trained = sum(lengths) - num_masked
    return _posted(parts, size=len(lengths), scores=found.scores, env_id=found.env_id, trained=trained)


def _posted(
    parts: Mapping[str, Text], *, size: int, scores: list[float], env_id: int | None, trained: int
) -> PostedGroup:
    pieces = [piece for name, key in _KEYS for piece in (key, parts.get(name, NULL))]
    payload = b"".join((*pieces, b"}"))
    return PostedGroup(
        payload=payload,
        digest=payload_digest(payload),
        size=size,
        env_id=env_id,
        outcome=_outcome(size, scores, trained),
    )


def _rows_of_ints(raw: bytes) -> tuple[list[int], int]:
    """Check that this is a list of lists of plain integers; returns their lengths, and how many are negative.

    The JSON is known to be well formed, so it is enough to see that no other kind of value begins anywhere. All letters but E are
    above the brackets, so one look at the largest sign tells of most.
    """
    signs = np.frombuffer(raw, np.uint8)
    if signs.max(initial=0) > BRACKET or any(raw.find(sign) >= 0 for sign in (b'"', b".", b"E")):
        raise _NotPlainError
    is_comma = signs == COMMA
    lengths = []
    for begin, end in _rows(raw):
        commas = int(np.count_nonzero(is_comma[begin:end]))
        lengths.append(commas + 1 if commas or raw[begin + 1 : end].strip() else 0)
    return lengths, int(np.count_nonzero(signs == MINUS))


def _check_floats(raw: bytes) -> None:
    """A list of lists of numbers, none of them too large for a float.

    Small numbers are written with e-05 and the like, which cannot overflow; with anything else of the kind all are read.
    """
    signs = np.frombuffer(raw, np.uint8)
    letters = np.flatnonzero(signs > BRACKET)
    is_plain = (
        raw.find(b'"') < 0
        and raw.find(b"E") < 0
        and bool((signs[letters] == EXPONENT).all() and (signs[letters + 1] == MINUS).all())
    )
    if is_plain:
        _rows(raw)
    else:
        _ROWS_OF_FLOATS.decode(raw)


def _rows(raw: bytes) -> list[tuple[int, int]]:
    """Where the inner lists of a list of lists begin and end; it must have some, and nothing else beside them."""
    rows = []
    begin = raw.find(b"[", raw.find(b"[") + 1)
    before, wanted = raw[:begin].strip(), b"["
    while begin >= 0:
        end = raw.find(b"]", begin)
        following = raw.find(b"[", begin + 1)
        if before.strip() != wanted or 0 <= following < end:
            raise _NotPlainError
        rows.append((begin, end))
        before, wanted = raw[end + 1 : following if following >= 0 else len(raw)], b","
        begin = following
    if not rows or before.strip() != b"]":
        raise _NotPlainError
    return rows


def _refuse_overflow(raw: bytes) -> None:
    """Numbers such as 1e999 are well formed, but no reader could hold them. Only exponents can do that in few letters."""
    if (b"e+" in raw or b"E" in raw or any(b"e%d" % digit in raw for digit in range(10))) and not _is_finite(raw):
        raise _NotPlainError


def _is_finite(raw: bytes) -> bool:
    try:
        msgspec.json.decode(raw)
    except msgspec.MsgspecError:
        return False
    return True


def _lax_group(found: Any, where: tuple[str | int, ...]) -> PostedGroup:
    try:
        group = ScoredData.model_validate(found, from_attributes=True)
    except ValidationError as error:
        raise refused(error, where) from None
    refuse_impossible(group, where)
    if group.env_id is not None and abs(group.env_id) > LARGEST_INT:
        raise refusal("int_parsing_size", (*where, "env_id"), "no environment has an id this large", str(group.env_id))
    try:
        parts = {name: _text(getattr(group, name)) for name in FIELDS}
    except (UnicodeEncodeError, ValueError, RecursionError):
        raise refusal(
            "json_invalid", where, "the body holds text or nesting that cannot be sent again as JSON"
        ) from None
    trained = sum(mark >= 0 for mask in group.masks for mark in mask)
    return _posted(parts, size=len(group.tokens), scores=group.scores, env_id=group.env_id, trained=trained)


def refused(error: ValidationError, where: tuple[str | int, ...] = ()) -> Refusal:
    """A verdict of pydantic as the original's clients read it."""
    return Refusal(
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


def _json(body: bytes) -> Any:
    if not body:
        raise refusal("missing", (), "Field required")
    try:
        return json.loads(body)
    except json.JSONDecodeError as error:
        raise refusal("json_invalid", (error.pos,), f"JSON decode error: {error.msg}", {}) from None
    except (ValueError, RecursionError) as error:
        raise refusal("json_invalid", (), f"JSON decode error: {error}", {}) from None


def _text(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()


def _outcome(size: int, scores: list[float], trained: int) -> GroupOutcome:
    mean, spread = _mean_and_spread(scores)
    return GroupOutcome(
        num_samples=size,
        num_scorable=len(scores),
        reward_mean=mean,
        reward_std=spread,
        solved_rate=None,
        truncated_rate=0.0,
        mean_turns=0.0,
        mean_response_tokens=trained / size if size else 0.0,
        seconds=0.0,
    )


def _mean_and_spread(scores: list[float]) -> tuple[float | None, float | None]:
    num = len(scores)
    try:
        mean = math.fsum(scores) / num
        return mean, math.sqrt(math.fsum((s - mean) ** 2 for s in scores) / (num - 1)) if num > 1 else None
    except (OverflowError, ZeroDivisionError):
        return None, None
