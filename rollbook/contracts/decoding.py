"""Decoders of JSON and MessagePack for given types, made once and one at a time. All code of the package gets its decoders here.

msgspec collects the fields of a class when the first decoder for it is made, and stores the incomplete result at the class. If
another thread decodes the class meanwhile, it reads missing fields and the process crashes (msgspec 0.22).

JSON and recorded values may be nested `MAX_DEPTH` levels deep. Without this limit that of the interpreter decides, and the same
bytes are accepted or refused depending on the caller's stack. JSON is checked before it is decoded. The frame of a group is
checked before it is encoded and when it is inspected (`group_codec.py`).
"""

import json
import threading
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Generic, TypeVar, overload

import msgspec
import numpy as np
from numpy.typing import NDArray

T = TypeVar("T")

MAX_DEPTH = 64
"""Levels of lists and objects in each other. Tool calls, schemas and facts of real agents have fewer than 20."""
TOO_DEEP = f"it is nested deeper than {MAX_DEPTH} levels"
MAX_VALUES = 1 << 18
MAX_MEMBERS = 1 << 15
MAX_CONTAINERS = 1 << 14
"""Values, members of objects, and lists and objects, in one request. msgspec holds the interpreter while it decodes, even in a
thread: about 0.1 µs for a number, 0.5 µs for a member and 1.5 µs for an object. So a body below these limits blocks the event loop
for less than 50 ms."""
SCANNED_FIRST = 1 << 18
FEW_STRINGS = 1 << 13
LARGEST_INT, SMALLEST_INT = 2**64 - 1, -(2**63)
"""Of the integers that MessagePack can hold."""
_NOT_STRUCTURE = bytes(set(range(256)) - set(b'[]{},:"'))
_STEPS = np.zeros(256, np.int8)
_STEPS[list(b"[{")], _STEPS[list(b"]}")] = 1, -1
_CONTAINERS = (dict, list, tuple, Mapping)

_making = threading.Lock()


class JsonDecoder(Generic[T]):
    """A decoder of msgspec that refuses deep nesting with `msgspec.DecodeError`, whatever the stack of the caller."""

    __slots__ = ("_decode",)

    def __init__(self, kind: Any) -> None:
        self._decode: Callable[[Any], T] = msgspec.json.Decoder(kind).decode

    def decode(self, raw: bytes | bytearray | memoryview | str | msgspec.Raw) -> T:
        if is_too_deep(raw):
            raise msgspec.DecodeError(f"the JSON cannot be decoded: {TOO_DEEP}")
        return self._decode(raw)

    def decode_body(self, raw: bytes, *, max_values: int = MAX_VALUES) -> T:
        """The body of a request, with limits on the number of its values."""
        check_body(raw, max_values=max_values)
        return self._decode(raw)


@overload
def json_decoder(kind: type[T]) -> JsonDecoder[T]: ...
@overload
def json_decoder(kind: Any) -> JsonDecoder[Any]: ...
def json_decoder(kind: Any) -> JsonDecoder[Any]:
    decoder: JsonDecoder[Any] = _decoder(JsonDecoder, kind)
    return decoder


@overload
def msgpack_decoder(kind: type[T]) -> msgspec.msgpack.Decoder[T]: ...
@overload
def msgpack_decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]: ...
def msgpack_decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    decoder: msgspec.msgpack.Decoder[Any] = _decoder(msgspec.msgpack.Decoder, kind)
    return decoder


def convert(value: Any, kind: type[T], *, strict: bool = True, dec_hook: Callable[[type, Any], Any] | None = None) -> T:
    """`msgspec.convert`, for a type that may be used here for the first time."""
    json_decoder(kind)
    return msgspec.convert(value, kind, strict=strict, dec_hook=dec_hook)


def check_body(raw: bytes, *, max_values: int = MAX_VALUES) -> None:
    """Raises `msgspec.DecodeError` for JSON that is nested too deeply or has too many values for an event loop."""
    brackets = raw.count(b"[") + raw.count(b"{")
    if brackets > MAX_DEPTH or raw.count(b",") >= max_values or raw.count(b":") > MAX_MEMBERS:
        # Most bodies that are refused are refused by their beginning.
        for part in (raw[:SCANNED_FIRST], raw) if len(raw) > SCANNED_FIRST else (raw,):
            steps, num_commas, num_members = _structure(part)
            if np.count_nonzero(steps > 0) > MAX_CONTAINERS or num_commas >= max_values or num_members > MAX_MEMBERS:
                raise msgspec.DecodeError(
                    f"the body has too many values: at most {max_values} values, {MAX_MEMBERS} members of objects and "
                    f"{MAX_CONTAINERS} lists and objects are accepted in one request; split it"
                )
            if _is_deep(steps):
                raise msgspec.DecodeError(f"the JSON cannot be decoded: {TOO_DEEP}")


def load_json(text: str) -> Any:
    """JSON that a policy or an agent wrote. Unlike msgspec, it accepts lone surrogates and integers of any size.

    Raises `ValueError` for deep nesting, and for NaN and infinity, which are not JSON.
    """
    if is_too_deep(text):
        raise ValueError(f"the JSON cannot be decoded: {TOO_DEEP}")
    return json.loads(text, parse_constant=_refuse_constant)


def is_too_deep(raw: bytes | bytearray | memoryview | str | msgspec.Raw) -> bool:
    """Whether a JSON text is nested deeper than `MAX_DEPTH`. Takes time proportional to its length, most of it in C."""
    if isinstance(raw, str):
        if raw.count("[") + raw.count("{") <= MAX_DEPTH:
            return False
        raw = raw.encode("utf-8", "replace")
    data = raw if isinstance(raw, bytes | bytearray) else bytes(raw)
    if data.count(b"[") + data.count(b"{") <= MAX_DEPTH:
        return False
    return _is_deep(_structure(data)[0])


def _is_deep(steps: NDArray[np.int8]) -> bool:
    return bool(len(steps)) and int(np.cumsum(steps, dtype=np.int32).max()) > MAX_DEPTH


def _structure(data: bytes | bytearray) -> tuple[NDArray[np.int8], int, int]:
    """Of the text outside of strings: a step for each bracket, 1 or -1, among zeros; the numbers of commas and of colons."""
    if b"\\" in data:
        data = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    if data.count(b'"') <= FEW_STRINGS:
        # Every second part is a string.
        outside = b"".join(data.split(b'"')[::2]).translate(None, _NOT_STRUCTURE)
        found = np.frombuffer(outside, np.uint8)
        return _STEPS.take(found), outside.count(b","), outside.count(b":")
    found = np.frombuffer(data.translate(None, _NOT_STRUCTURE), np.uint8)
    # Quotes open and close strings in turn. The sum may overflow: only its parity counts.
    is_outside = np.cumsum(found == ord('"'), dtype=np.uint8) & 1 == 0
    steps = _STEPS.take(found)
    steps *= is_outside
    commas, colons = (int(np.count_nonzero((found == ord(sign)) & is_outside)) for sign in ",:")
    return steps, commas, colons


def is_nested_too_deep(value: Any) -> bool:
    """Whether a decoded value is nested deeper than `MAX_DEPTH`. A string or a number has no level."""
    level = [value] if isinstance(value, _CONTAINERS) else []
    for _ in range(MAX_DEPTH):
        # Each object once: a value that contains itself would grow without end.
        found = {
            id(inner): inner
            for item in level
            for inner in (item.values() if isinstance(item, Mapping) else item)
            if isinstance(inner, _CONTAINERS)
        }
        if not found:
            return False
        level = list(found.values())
    return True


def recordable(value: Any, levels: int = MAX_DEPTH) -> Any:
    """The value as MessagePack can hold it, for the record of an episode.

    A policy writes the JSON that agents and environments parse and record. What it writes is data and must not make the episode
    fail: lone surrogates are escaped, integers of more than 64 bits become text, and what is nested too deeply is replaced.
    Raises `ValueError` for a value that contains itself, which no policy can write.
    """
    inside: set[int] = set()

    def visit(value: Any, levels: int) -> Any:
        if isinstance(value, str):
            return valid_text(value)
        if isinstance(value, int) and not isinstance(value, bool) and not SMALLEST_INT <= value <= LARGEST_INT:
            return _decimal(value)
        if not isinstance(value, _CONTAINERS):
            return value
        if id(value) in inside:
            raise ValueError("a value contains itself")
        if levels == 0:
            return f"({TOO_DEEP})"
        inside.add(id(value))
        copy: Any
        if isinstance(value, Mapping):
            copy = {visit(key, levels - 1): visit(inner, levels - 1) for key, inner in value.items()}
        else:
            copy = [visit(inner, levels - 1) for inner in value]
        inside.remove(id(value))
        return copy

    return visit(value, levels)


def valid_text(text: str) -> str:
    r"""The text with lone surrogates escaped as in JSON (`\ud800`): they come from a policy's JSON and have no UTF-8 form."""
    return text.encode(errors="backslashreplace").decode()


def _decimal(number: int) -> str:
    try:
        return str(number)
    except ValueError:  # more digits than Python converts
        return f"an integer of {number.bit_length()} bits"


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


@cache
def _decoder(make: Callable[[Any], Any], kind: Any) -> Any:
    with _making:
        return make(kind)
