"""What rank 0 sends to the other ranks, as MessagePack: numbers, text and arrays. Nothing that is read here can run code.

A call is the name of a method with its arguments. Arrays are sent as their bytes, so a pass has the same bits at every rank.
"""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from rollbook.trainer.data.passes import Microbatch, RowSource
from rollbook.trainer.data.prefixes import PackedSequences
from rollbook.trainer.data.rows import TrainRow
from rollbook.trainer.distributed.sharding import Passes

ARRAY = 1
"""The code of arrays among the extension types of MessagePack."""
HEAD = struct.Struct("<4sB")
"""dtype and number of dimensions; the dimensions follow as 64-bit integers."""
DTYPES = frozenset({"<i1", "|i1", "<i4", "<i8", "<f4", "<f8", "|b1"})


class InvalidCallError(Exception):
    """The other rank sent something that is no call: it has another release."""


@dataclass(frozen=True, slots=True)
class RankCall:
    method: str
    arguments: Any = None


def encode_call(method: str, arguments: Any = None) -> bytes:
    """`arguments`: anything that MessagePack has a type for, dataclasses of this room, and arrays."""
    return msgspec.msgpack.encode((method, arguments), enc_hook=_encode_array)


def decode_call(payload: bytes) -> RankCall:
    """Raises `InvalidCallError`."""
    try:
        method, arguments = msgspec.msgpack.decode(payload, ext_hook=_decode_array)
    except (msgspec.MsgspecError, struct.error, TypeError, ValueError) as error:
        raise InvalidCallError(f"the other trainer rank sent an invalid message: {error}") from error
    return RankCall(method, arguments)


def read_passes(found: Sequence[Sequence[Sequence[Any]]]) -> list[Passes]:
    """The passes of each minibatch, as `Ranks.own_passes` makes them."""
    return [[(_microbatch(fields), bool(is_own)) for fields, is_own in passes] for passes in found]


def read_rows(found: Sequence[Mapping[str, Any]]) -> list[TrainRow]:
    return [TrainRow(**{**fields, "place": tuple(fields["place"])}) for fields in found]


def _microbatch(fields: Mapping[str, Any]) -> Microbatch:
    sequences = fields["sequences"]
    if sequences is not None:
        lengths, added = tuple(sequences["lengths"]), tuple(sequences["added"])
        sequences = PackedSequences(lengths=lengths, added=added, sources_F=sequences["sources_F"])
    sources = tuple(RowSource(**source) for source in fields["sources"])
    return Microbatch(**{**fields, "sequences": sequences, "members": tuple(fields["members"]), "sources": sources})


def _encode_array(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    if not isinstance(value, np.ndarray) or value.dtype.str not in DTYPES:
        raise TypeError(f"a trainer rank cannot be sent a {type(value).__name__}")
    head = HEAD.pack(value.dtype.str.encode(), value.ndim) + struct.pack(f"<{value.ndim}q", *value.shape)
    return msgspec.msgpack.Ext(ARRAY, head + np.ascontiguousarray(value).tobytes())


def _decode_array(code: int, data: memoryview) -> NDArray[Any]:
    name, dimensions = HEAD.unpack_from(data)
    dtype = name.rstrip(b"\0").decode(errors="replace")
    if code != ARRAY or dtype not in DTYPES:
        raise ValueError(f"unknown type {code} or dtype {dtype!r}")
    shape = struct.unpack_from(f"<{dimensions}q", data, HEAD.size)
    start = HEAD.size + 8 * dimensions
    # A copy that can be written to, like an array that was never sent.
    return np.frombuffer(bytearray(data[start:]), dtype=dtype).reshape(shape)
