"""Decoders of JSON and MessagePack for given types, made once and one at a time. All code of the package gets its decoders here.

msgspec collects the fields of a class when the first decoder for it is made, and stores the incomplete result at the class. If
another thread decodes the class meanwhile, it reads missing fields and the process crashes (msgspec 0.22).
"""

import threading
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar, overload

import msgspec

T = TypeVar("T")

_making = threading.Lock()


@overload
def json_decoder(kind: type[T]) -> msgspec.json.Decoder[T]: ...
@overload
def json_decoder(kind: Any) -> msgspec.json.Decoder[Any]: ...
def json_decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    decoder: msgspec.json.Decoder[Any] = _decoder(msgspec.json.Decoder, kind)
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


@cache
def _decoder(make: Callable[[Any], Any], kind: Any) -> Any:
    with _making:
        return make(kind)
