"""The OpenEnv wire: what a client and a server of environments say to each other, as JSON texts over one WebSocket.

    {"type": "reset", "data": {"task": {…}, "seed": 1}}
    {"type": "step", "data": {"action": "7"}}
        {"type": "observation", "data": {"observation": {…}, "reward": 1.0, "done": true}}
    {"type": "state"}
        {"type": "state", "data": {"episode_id": "…", "step_count": 3}}
    {"type": "close"}
    and, whenever something is wrong:
        {"type": "error", "data": {"message": "…", "code": "EXECUTION_ERROR"}}

Both ends live here, so that they cannot disagree. Environments of ours hear and say text; `Dialect` is the seam for an
environment whose actions
and observations are objects of its own (`openenv_host.py`).
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

import msgspec

from rollbook.contracts.environment import Observation

SOCKET_PATH = "/ws"
TICKETS_PATH = "/tickets"
HEALTH_PATH = "/health"
# What OpenEnv itself puts beside a row: never part of the task.
RESET_WORDS = ("task", "seed", "episode_id")
ACTION_FIELD = "action"


class Verb(StrEnum):
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
    """A message that cannot be used. The code is what the other end is told."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.code = code


class _Message(msgspec.Struct):
    type: str
    data: dict[str, Any] = {}


_decode = msgspec.json.Decoder(_Message).decode
# Facts may hold anything an environment's author put there; what JSON has no word for is told as text.
_encode = msgspec.json.Encoder(enc_hook=str).encode


@dataclass(frozen=True, slots=True)
class Request:
    verb: Verb
    data: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Reply:
    kind: ReplyKind
    data: dict[str, Any]


def encode(kind: str, data: Mapping[str, Any] | None = None) -> str:
    """One message as text. Raises `WireError` when the data cannot be told in JSON (a lone surrogate in a text)."""
    return encode_body({"type": kind, "data": data} if data is not None else {"type": kind})


def encode_body(body: Mapping[str, Any]) -> str:
    try:
        return _encode(body).decode()
    except Exception as error:  # facts are foreign: a circle, a huge number, an object whose own text fails
        raise WireError(
            ErrorCode.EXECUTION_ERROR, f"this cannot be sent as JSON: {type(error).__name__}: {error}"
        ) from error


def read_request(text: str | bytes) -> Request:
    message = _read(text)
    try:
        return Request(Verb(message.type), message.data)
    except ValueError:
        raise WireError(
            ErrorCode.UNKNOWN_TYPE, f"there is no message {message.type!r}; known are {', '.join(Verb)}"
        ) from None


def read_reply(text: str | bytes) -> Reply:
    message = _read(text)
    try:
        return Reply(ReplyKind(message.type), message.data)
    except ValueError:
        raise WireError(
            ErrorCode.UNKNOWN_TYPE, f"the server answered with a {message.type!r}, which no client knows"
        ) from None


def _read(text: str | bytes) -> _Message:
    try:
        return _decode(text)
    except msgspec.ValidationError as error:
        raise WireError(
            ErrorCode.VALIDATION_ERROR, f"a message is an object with a type and an object of data: {error}"
        ) from error
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise WireError(ErrorCode.INVALID_JSON, f"this is not JSON: {error}") from error


def task_of(data: Mapping[str, Any]) -> dict[str, Any]:
    """The row in the data of a reset: the object `task`, or, where there is none, the fields themselves. A seed joins the row."""
    task = data.get("task")
    if not isinstance(task, Mapping):
        return {name: value for name, value in data.items() if name != "episode_id"}
    strays = sorted(set(data) - set(RESET_WORDS))
    if strays:
        raise WireError(
            ErrorCode.VALIDATION_ERROR,
            f"reset: beside the object 'task' only seed and episode_id are read, and here is also {', '.join(strays)}; "
            "put it into the task",
        )
    seed = {} if data.get("seed") is None else {"seed": data["seed"]}
    return {**seed, **task}


def episode_id_of(data: Mapping[str, Any]) -> str | None:
    given = data.get("episode_id")
    if given is not None and (not isinstance(given, str) or len(given) > 255):
        raise WireError(ErrorCode.VALIDATION_ERROR, "reset: episode_id is a text of at most 255 characters")
    return given


def text_action_of(data: Mapping[str, Any]) -> str:
    """The one text in an action, under whichever name its client knows (`action`, `command`, `message` …)."""
    fields = {name: value for name, value in data.items() if name != "metadata"}
    if len(fields) == 1 and isinstance(text := next(iter(fields.values())), str):
        return text
    raise WireError(
        ErrorCode.VALIDATION_ERROR,
        f'step: an action is an object with one text, as in {{"action": "…"}}; this one has {described(fields)}',
    )


def described(fields: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} ({type(value).__name__})" for name, value in fields.items()) or "no field"


def result_data(dialect: "Dialect", answer: Observation, *, with_facts: bool) -> dict[str, Any]:
    """The data of an observation message. Facts stand beside what the agent sees, never in it."""
    if not math.isfinite(answer.reward):
        raise WireError(ErrorCode.EXECUTION_ERROR, f"the environment paid {answer.reward}; a reward is a finite number")
    data: dict[str, Any] = {
        "observation": dialect.observed(answer),
        "reward": float(answer.reward),
        "done": answer.done,
    }
    if with_facts and (facts := dialect.facts(answer)):
        data["metadata"] = dict(facts)
    return data


def observation_of(data: Mapping[str, Any]) -> Observation:
    """What an observation message says, also one from a server that is not ours."""
    observed, reward = data.get("observation"), data.get("reward")
    if not isinstance(observed, Mapping) or not isinstance(reward, int | float | None):
        raise WireError(
            ErrorCode.VALIDATION_ERROR, f"an observation message needs observation and reward; it has {described(data)}"
        )
    metadata = data.get("metadata") or observed.get("metadata") or {}
    text, solved = observed.get("text"), observed.get("solved")
    facts = dict(metadata) if isinstance(metadata, Mapping) else {"metadata": metadata}
    if not isinstance(text, str):
        seen = {name: value for name, value in observed.items() if name != "metadata"}
        text, facts = json.dumps(seen, ensure_ascii=False), {**facts, "observation": seen}
    return Observation(
        text=text,
        reward=float(reward or 0.0),
        done=bool(data.get("done", False)),
        solved=solved if isinstance(solved, bool) else None,
        facts=facts,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeState:
    """Where a session stands: the answer to `state`."""

    episode_id: str | None = None
    step_count: int = 0
    done: bool = False
    last: Observation | None = field(default=None, repr=False)


class Dialect(Protocol):
    """How the tasks, actions and observations of an environment look on the wire."""

    def task_of(self, data: Mapping[str, Any]) -> Mapping[str, Any]: ...

    def action_of(self, data: Mapping[str, Any]) -> str: ...

    def observed(self, answer: Observation) -> Mapping[str, Any]: ...

    def facts(self, answer: Observation) -> Mapping[str, Any]: ...

    def state(self, state: EpisodeState) -> Mapping[str, Any]: ...

    def schema(self) -> Mapping[str, Any]: ...


class TextDialect:
    """Environments of ours: a text in, a text out."""

    def task_of(self, data: Mapping[str, Any]) -> Mapping[str, Any]:
        return task_of(data)

    def action_of(self, data: Mapping[str, Any]) -> str:
        return text_action_of(data)

    def observed(self, answer: Observation) -> Mapping[str, Any]:
        return {"text": answer.text, "solved": answer.solved}

    def facts(self, answer: Observation) -> Mapping[str, Any]:
        return answer.facts

    def state(self, state: EpisodeState) -> Mapping[str, Any]:
        return {"episode_id": state.episode_id, "step_count": state.step_count, "done": state.done}

    def schema(self) -> Mapping[str, Any]:
        text = {"type": "string"}
        return {
            "action": {
                "type": "object",
                "title": "TextAction",
                "description": "One text; a client may give it any other name than 'action'.",
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
