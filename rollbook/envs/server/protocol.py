"""The OpenEnv protocol: JSON text messages between client and server over one WebSocket.

    {"type": "reset", "data": {"task": {…}, "seed": 1}}
    {"type": "step", "data": {"action": "7"}}
        {"type": "observation", "data": {"observation": {…}, "reward": 1.0, "done": true}}
    {"type": "state"}
        {"type": "state", "data": {"episode_id": "…", "step_count": 3}}
    {"type": "close"}
    and, on any error:
        {"type": "error", "data": {"message": "…", "code": "EXECUTION_ERROR"}}

Client and server share this module. Actions and observations of our environments are text. A `Dialect` maps them to messages; an
environment with its own message models has another one (`openenv.py`).
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

import msgspec

from rollbook.contracts.decoding import is_nested_too_deep, json_decoder, recordable
from rollbook.contracts.task import Observation

SOCKET_PATH = "/ws"
RESERVATIONS_PATH = "/reservations"
HEALTH_PATH = "/health"
SCHEMA_PATH = "/schema"
# The fields of a reset message next to the object `task`.
RESET_FIELDS = {"task", "seed", "episode_id"}
ACTION_FIELD = "action"


class EnvVerb(StrEnum):
    RESET = "reset"
    STEP = "step"
    STATE = "state"
    CLOSE = "close"
    MCP = "mcp"


class ReplyKind(StrEnum):
    OBSERVATION = "observation"
    STATE = "state"
    ERROR = "error"
    MCP = "mcp"


class ErrorCode(StrEnum):
    INVALID_JSON = "INVALID_JSON"
    UNKNOWN_TYPE = "UNKNOWN_TYPE"
    VALIDATION_ERROR = "VALIDATION_ERROR"
    EXECUTION_ERROR = "EXECUTION_ERROR"
    CAPACITY_REACHED = "CAPACITY_REACHED"
    FACTORY_ERROR = "FACTORY_ERROR"
    SESSION_ERROR = "SESSION_ERROR"


class WireError(Exception):
    """A message that cannot be used, with the error code for the other side."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.code = code


class _Message(msgspec.Struct):
    type: str
    data: dict[str, Any] = {}


# Facts may hold any object; an object without a JSON form is sent as text.
_encode = msgspec.json.Encoder(enc_hook=str).encode


@dataclass(frozen=True, slots=True)
class EnvRequest:
    verb: EnvVerb
    data: dict[str, Any]


@dataclass(frozen=True, slots=True)
class EnvReply:
    kind: ReplyKind
    data: dict[str, Any]


def encode(kind: str, data: Mapping[str, Any] | None = None) -> str:
    """One message as text. Raises `WireError` if the data has no JSON form (for example a circular structure)."""
    return encode_body({"type": kind, "data": data} if data is not None else {"type": kind})


def encode_body(body: Mapping[str, Any]) -> str:
    try:
        if is_nested_too_deep(body):
            body = recordable(body)
        try:
            return _encode(body).decode()
        except UnicodeEncodeError:  # a lone surrogate, which a policy can write in JSON
            return _encode(recordable(body)).decode()
    except Exception as error:  # facts are user data: a circular structure, a huge number, an object whose `str` fails
        raise WireError(
            ErrorCode.EXECUTION_ERROR, f"this cannot be sent as JSON: {type(error).__name__}: {error}"
        ) from error


def read_request(text: str | bytes) -> EnvRequest:
    message = _read(text, json_decoder(_Message).decode_body)
    try:
        return EnvRequest(EnvVerb(message.type), message.data)
    except ValueError:
        raise WireError(
            ErrorCode.UNKNOWN_TYPE, f"unknown message type {message.type!r}; known are {', '.join(EnvVerb)}"
        ) from None


def read_reply(text: str | bytes) -> EnvReply:
    message = _read(text, json_decoder(_Message).decode)
    try:
        return EnvReply(ReplyKind(message.type), message.data)
    except ValueError:
        raise WireError(
            ErrorCode.UNKNOWN_TYPE, f"the server replied with the unknown message type {message.type!r}"
        ) from None


def _read(text: str | bytes, decode: Callable[[bytes], _Message]) -> _Message:
    try:
        return decode(text.encode() if isinstance(text, str) else text)
    except msgspec.ValidationError as error:
        raise WireError(
            ErrorCode.VALIDATION_ERROR, f"a message is an object with a type and an object of data: {error}"
        ) from error
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise WireError(ErrorCode.INVALID_JSON, f"this is not JSON: {error}") from error


def episode_id_of(data: Mapping[str, Any]) -> str | None:
    given = data.get("episode_id")
    if given is not None and (not isinstance(given, str) or len(given) > 255):
        raise WireError(ErrorCode.VALIDATION_ERROR, "reset: episode_id must be a text of at most 255 characters")
    return given


def _field_types(fields: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} ({type(value).__name__})" for name, value in fields.items()) or "no field"


def result_data(dialect: "Dialect", seen: Observation, *, with_facts: bool) -> dict[str, Any]:
    """The data of an observation message. Facts are outside the part that the agent sees."""
    if not math.isfinite(seen.reward):
        raise WireError(ErrorCode.EXECUTION_ERROR, f"the environment's reward is {seen.reward}; it must be finite")
    data: dict[str, Any] = {
        "observation": dialect.observed(seen),
        "reward": float(seen.reward),
        "done": seen.done,
    }
    if seen.last_action is not None:
        data["last_action"] = seen.last_action
    if with_facts and (facts := dialect.facts(seen)):
        data["metadata"] = dict(facts)
    return data


def observation_of(data: Mapping[str, Any]) -> Observation:
    """The observation in a message of our server or of another OpenEnv server."""
    observed, reward = data.get("observation"), data.get("reward")
    if not isinstance(observed, Mapping) or not isinstance(reward, int | float | None):
        raise WireError(
            ErrorCode.VALIDATION_ERROR,
            f"an observation message needs observation and reward; it has {_field_types(data)}",
        )
    metadata = data.get("metadata") or observed.get("metadata") or {}
    text, solved, last_action = observed.get("text"), observed.get("solved"), data.get("last_action")
    facts = dict(metadata) if isinstance(metadata, Mapping) else {"metadata": metadata}
    if not isinstance(text, str):
        visible = {name: value for name, value in observed.items() if name != "metadata"}
        text, facts = json.dumps(visible, ensure_ascii=False), {**facts, "observation": visible}
    return Observation(
        text=text,
        reward=float(reward or 0.0),
        done=bool(data.get("done", False)),
        solved=solved if isinstance(solved, bool) else None,
        facts=facts,
        earlier=_messages(observed.get("earlier")),
        last_action=last_action if isinstance(last_action, str) else None,
    )


def _messages(given: Any) -> tuple[Mapping[str, str], ...]:
    items = given if isinstance(given, list) else []
    fields = [(item.get("role"), item.get("content")) for item in items if isinstance(item, Mapping)]
    return tuple(
        {"role": role, "content": text} for role, text in fields if isinstance(role, str) and isinstance(text, str)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeState:
    """The state of a session's episode: the reply to `state`."""

    episode_id: str | None = None
    step_count: int = 0
    done: bool = False
    last: Observation | None = field(default=None, repr=False)


class Dialect(Protocol):
    """The form of tasks, actions and observations in messages."""

    def task_of(self, data: Mapping[str, Any]) -> Mapping[str, Any]: ...

    def action_of(self, data: Mapping[str, Any]) -> str: ...

    def observed(self, seen: Observation) -> Mapping[str, Any]: ...

    def facts(self, seen: Observation) -> Mapping[str, Any]: ...

    def state(self, state: EpisodeState) -> Mapping[str, Any]: ...

    def schema(self) -> Mapping[str, Any]: ...


class TextDialect:
    """The dialect of our environments: actions and observations are text."""

    def task_of(self, data: Mapping[str, Any]) -> dict[str, Any]:
        """The object `task`, or all fields if there is none. A seed is added to the task."""
        task = data.get("task")
        if not isinstance(task, Mapping):
            return {name: value for name, value in data.items() if name != "episode_id"}
        unknown = sorted(data.keys() - RESET_FIELDS)
        if unknown:
            raise WireError(
                ErrorCode.VALIDATION_ERROR,
                f"reset: unknown {', '.join(unknown)} next to 'task', only seed and episode_id are allowed; "
                "put it into the task",
            )
        seed = {} if data.get("seed") is None else {"seed": data["seed"]}
        return {**seed, **task}

    def action_of(self, data: Mapping[str, Any]) -> str:
        """The only text field of an action; clients name it differently (`action`, `command`, `message` …)."""
        fields = {name: value for name, value in data.items() if name != "metadata"}
        if len(fields) == 1 and isinstance(text := next(iter(fields.values())), str):
            return text
        raise WireError(
            ErrorCode.VALIDATION_ERROR,
            f'step: an action is an object with one text, as in {{"action": "…"}}; this one has {_field_types(fields)}',
        )

    def observed(self, seen: Observation) -> Mapping[str, Any]:
        earlier = {"earlier": [dict(message) for message in seen.earlier]} if seen.earlier else {}
        return {"text": seen.text, "solved": seen.solved, **earlier}

    def facts(self, seen: Observation) -> Mapping[str, Any]:
        return seen.facts

    def state(self, state: EpisodeState) -> Mapping[str, Any]:
        return {"episode_id": state.episode_id, "step_count": state.step_count, "done": state.done}

    def schema(self) -> Mapping[str, Any]:
        text = {"type": "string"}
        return {
            "action": {
                "type": "object",
                "title": "TextAction",
                "description": "One text field; a client may use another name than 'action'.",
                "properties": {ACTION_FIELD: text},
                "required": [ACTION_FIELD],
            },
            "observation": {
                "type": "object",
                "title": "TextObservation",
                "properties": {"text": text, "solved": {"type": ["boolean", "null"]}},
                "required": ["text"],
            },
            "state": {
                "type": "object",
                "title": "EpisodeState",
                "properties": {
                    "episode_id": {"type": ["string", "null"]},
                    "step_count": {"type": "integer", "minimum": 0},
                    "done": {"type": "boolean"},
                },
            },
        }
