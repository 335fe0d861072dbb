"""Decoders: made by one thread at a time, with a limit of depth that does not depend on the caller."""

import json
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import msgspec
import pytest

from rollbook.contracts.decoding import (
    MAX_DEPTH,
    is_nested_too_deep,
    is_too_deep,
    json_decoder,
    load_json,
    recordable,
)

T = TypeVar("T")

FIRST_USES = """
import dataclasses, sys, threading
import msgspec
from rollbook.contracts.decoding import convert, json_decoder, msgpack_decoder

sys.setswitchinterval(1e-6)


def decode(kind, together, number):
    row = {f"f{n}": None if n % 2 else {f"x{m}": m for m in range(30)} for n in range(60)}
    together.wait()
    if number % 3 == 0:
        decoded = json_decoder(kind).decode(msgspec.json.encode(row))
    elif number % 3 == 1:
        decoded = msgpack_decoder(kind).decode(msgspec.msgpack.encode(row))
    else:
        decoded = convert(row, kind)
    assert decoded.f0.x1 == 1


for number in range(150):
    make = dataclasses.make_dataclass if number % 2 else msgspec.defstruct
    inner = make(f"Inner{number}", [(f"x{n}", int) for n in range(30)])
    kind = make(f"Outer{number}", [(f"f{n}", "int | None" if n % 2 else inner) for n in range(60)])
    together = threading.Barrier(6)
    threads = [threading.Thread(target=decode, args=(kind, together, n)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
"""


def test_threads_may_decode_a_class_for_the_first_time_together() -> None:
    done = subprocess.run([sys.executable, "-c", FIRST_USES], capture_output=True, text=True, check=False, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")


def nested(levels: int, text: str = "") -> str:
    """A JSON text of lists and objects in each other, with brackets in strings that are no levels."""
    opening = "".join('{"[a{\\"":' if level % 2 else "[" for level in range(levels))
    closing = "".join("}" if level % 2 else "]" for level in reversed(range(levels)))
    return f"{opening}{json.dumps(text)}{closing}"


def at_stack_depth(depth: int, call: Callable[[], T]) -> T:
    return call() if depth == 0 else at_stack_depth(depth - 1, call)


def verdict(call: Callable[[], object]) -> str:
    try:
        call()
    except ValueError as error:
        return str(error)
    return "ok"


@pytest.mark.parametrize("stack", [0, 300, 700])
@pytest.mark.parametrize(
    ("text", "is_accepted"),
    [
        (nested(MAX_DEPTH), True),
        (nested(MAX_DEPTH + 1), False),
        (nested(5_000), False),
        (nested(MAX_DEPTH, "[" * 5_000), True),
        (nested(MAX_DEPTH, '\\"[[[' * 100), True),
        ("[" + "[],{}," * 500 + "1]", True),
        ("[" * 100_000, False),
    ],
    ids=["limit", "above", "far-above", "in-a-string", "escaped-quotes", "siblings", "unbalanced"],
)
def test_json_is_accepted_up_to_a_depth_that_does_not_depend_on_the_stack(
    text: str, is_accepted: bool, stack: int
) -> None:
    expected = "ok" if is_accepted else "the JSON cannot be decoded: it is nested deeper than 64 levels"
    for raw in (text, text.encode(), memoryview(text.encode())):
        decode = partial(json_decoder(Any).decode, raw)
        assert at_stack_depth(stack, partial(verdict, decode)) == expected
    assert at_stack_depth(stack, lambda: verdict(lambda: load_json(text))) == expected
    assert is_too_deep(text) is not is_accepted


def test_the_depth_of_a_decoded_value_is_that_of_its_json() -> None:
    for levels in (1, 2, MAX_DEPTH - 1, MAX_DEPTH, MAX_DEPTH + 1, 200):
        value = json.loads(nested(levels))
        assert is_nested_too_deep(value) is is_too_deep(nested(levels)) is (levels > MAX_DEPTH)
        assert not is_nested_too_deep(recordable(value))
    assert not any(map(is_nested_too_deep, ("text", 1, None, [], {})))


def test_json_of_a_policy_may_have_lone_surrogates_and_large_integers_but_no_nan() -> None:
    assert load_json('{"a": "\\ud800", "b": 36893488147419103232}') == {"a": "\ud800", "b": 2**65}
    for text in ("NaN", "[Infinity]", '{"a": -Infinity}', "[1"):
        with pytest.raises(ValueError, match=r"not JSON|Expecting"):
            load_json(text)


def test_what_a_record_cannot_hold_is_replaced_and_the_rest_is_kept() -> None:
    value = {"t\ud800": ["é", "\udfff", 2**63, -(2**63), 2**64, -(2**80), 10**5000, True, 0.5, None]}
    recorded = recordable(value)
    assert recorded == {
        "t\\ud800": [
            "é", "\\udfff", 2**63, -(2**63), str(2**64), str(-(2**80)), "an integer of 16610 bits", True, 0.5, None
        ]
    }  # fmt: skip
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(recorded)) == recorded
