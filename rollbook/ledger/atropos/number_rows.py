"""Lists of lists of numbers in JSON, looked at where they lie in a body: nearly all of what is posted.

Integers are checked sixteen signs at a time instead of read one by one. Written plainly, as every common library writes them, what
may follow what can be seen from a few comparisons of the whole text with itself, moved on by one sign. Other numbers go through
the JSON reader, which skips them. Anything else, right or wrong, is left to the reader of whole bodies: whatever is taken here is
valid, not everything that is valid is taken.
"""

from dataclasses import dataclass

import msgspec
import numpy as np

SPACE, COMMA, MINUS, ZERO, NINE = b" ,-09"
OPENING, CLOSING, EXPONENT = b"[]e"
FIRST_SIGNS = frozenset(b"-0123456789")
DIGITS = frozenset(b"0123456789")
_any = np.logical_or.reduce
"""What the method of arrays calls in the end."""
_ANYTHING = msgspec.json.Decoder(msgspec.Raw)
"""Skips over a value, and so finds out whether it is well formed."""


@dataclass(frozen=True, slots=True)
class IntRows:
    begin: int
    end: int
    """Where the text lies in the body."""
    lengths: list[int]
    num_negative: int


def find_int_rows(body: bytes, begin: int) -> IntRows | None:
    """The list of lists of integers whose text begins here. None: no such list, or not a plain one."""
    rows = _rows(body, begin)
    if rows is None:
        return None
    end = rows[-1][1] + 2
    signs = np.frombuffer(body, np.uint8, end - begin, begin)
    # Above the digits nothing but the brackets that were found.
    if np.count_nonzero(signs > NINE) != 2 * len(rows) + 2:
        return None
    below, commas, spaces = signs < ZERO, signs == COMMA, signs == SPACE
    # A digit or a bracket before each comma; behind each a space, or behind none.
    if _any(below[:-1] & commas[1:]) or (_any(spaces) and _any(commas[:-1] ^ spaces[1:])):
        return None
    # A zero that begins a number is all of it.
    zeros = below[:-1] & (signs[1:] == ZERO)
    if _any(zeros):
        behind = signs[np.flatnonzero(zeros) + 2]
        if ((behind >= ZERO) & (behind <= NINE)).any():
            return None
    num_negative = 0
    others = below ^ commas ^ spaces
    if _any(others):
        num_first = sum(body[first + 1] == MINUS for first, _ in rows)
        minuses = signs == MINUS
        # Of what is left all are minuses, each behind a comma, a space or the bracket of its row.
        if (
            _any(others ^ minuses)
            or _any(minuses[:-1] & minuses[1:])
            or np.count_nonzero(minuses[1:] > below[:-1]) != num_first
        ):
            return None
        num_negative = int(np.count_nonzero(minuses))
    lengths = [int(np.count_nonzero(commas[first - begin : last - begin])) + 1 for first, last in rows]
    return IntRows(begin, end, lengths, num_negative)


def find_float_rows(body: bytes, begin: int) -> tuple[int, int] | None:
    """Where the text of the list of lists of numbers lies that begins here; none of them is too large for a float."""
    rows = _rows(body, begin)
    if rows is None:
        return None
    end = rows[-1][1] + 2
    if body.find(b'"', begin, end) >= 0:
        return None
    signs = np.frombuffer(body, np.uint8, end - begin, begin)
    is_high = signs > NINE
    if np.count_nonzero(is_high) != 2 * len(rows) + 2:
        # Small numbers are written with e-05 and the like, which cannot overflow; any other letter is not for us.
        high = np.flatnonzero(is_high)
        letters = high[(signs[high] != OPENING) & (signs[high] != CLOSING)]
        if len(high) - len(letters) != 2 * len(rows) + 2:
            return None
        if not ((signs[letters] == EXPONENT).all() and (signs[letters + 1] == MINUS).all()):
            return None
    try:
        _ANYTHING.decode(memoryview(body)[begin:end])
    except msgspec.MsgspecError:
        return None
    return begin, end


def _rows(body: bytes, begin: int) -> list[tuple[int, int]] | None:
    """The brackets of each inner list, none of them empty, with a comma and perhaps a space between two of them."""
    if begin < 0 or body[begin : begin + 2] != b"[[":
        return None
    rows: list[tuple[int, int]] = []
    find, first = body.find, begin + 1
    while True:
        last = find(b"]", first)
        if last < 0 or body[last - 1] not in DIGITS:
            return None
        begins = body[first + 1]
        if begins not in FIRST_SIGNS or (begins == ZERO and body[first + 2] in DIGITS):
            return None
        rows.append((first, last))
        behind = body[last + 1 : last + 4]
        if behind == b", [":
            first = last + 3
        elif behind[:2] == b",[":
            first = last + 2
        else:
            return rows if behind[:1] == b"]" else None
