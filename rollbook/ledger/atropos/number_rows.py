"""Lists of lists of numbers in JSON, looked at where they lie in a body: nearly all of what is posted.

Integers are checked sixteen signs at a time instead of read one by one. Written plainly, as every common library writes them, what
may follow what can be seen from a few comparisons of the whole text with itself, moved on by one sign. Other numbers go through
the JSON reader, which skips them. Masks that repeat their tokens, as environments write them, are compared with them and not looked
at again. Anything else, right or wrong, is left to the reader of whole bodies: whatever is taken here is
valid, not everything that is valid is taken.
"""

from dataclasses import dataclass

import msgspec
import numpy as np

SPACE, COMMA, MINUS, ZERO, NINE, EXPONENT = b" ,-09e"
FIRST_SIGNS = frozenset(b"-0123456789")
DIGITS = frozenset(b"0123456789")
NO_NUMBER = (b'"', b"{", b"n", b"E")
"""Each other kind of value has one of these signs, or an e that no minus follows."""
FEW = 16
MASKED_SPACED, MASKED_CLOSE = b"-100, ", b"-100,"
"""The mark of a token that is not trained."""
BEFORE_NUMBER = b"[ ,"
_any = np.logical_or.reduce
"""What the method of arrays calls in the end."""
_ANYTHING = msgspec.json.Decoder(msgspec.Raw)
"""Skips over a value, and so finds out whether it is well formed."""


@dataclass(frozen=True, slots=True)
class IntRows:
    begin: int
    end: int
    """Where the text lies in the body."""
    rows: list[tuple[int, int]]
    """The brackets of each inner list."""
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
    return IntRows(begin, end, rows, lengths, num_negative)


def find_float_rows(body: bytes, begin: int) -> tuple[int, int] | None:
    """Where the text of the list of lists of numbers lies that begins here; none of them is too large for a float."""
    rows = _rows(body, begin)
    if rows is None:
        return None
    end = rows[-1][1] + 2
    if any(body.find(sign, begin, end) >= 0 for sign in NO_NUMBER) or not _are_small(body, begin, end):
        return None
    try:
        _ANYTHING.decode(memoryview(body)[begin:end])
    except msgspec.MsgspecError:
        return None
    return begin, end


def _are_small(body: bytes, begin: int, end: int) -> bool:
    """Whether numbers with an exponent are written with e-05 and the like, which cannot overflow. No word has an e and a minus."""
    at = body.find(b"e", begin, end)
    for _ in range(FEW):
        if at < 0:
            return True
        if body[at + 1] != MINUS:
            return False
        at = body.find(b"e", at + 1, end)
    signs = np.frombuffer(body, np.uint8, end - begin, begin)
    return not _any((signs[:-1] == EXPONENT) & (signs[1:] != MINUS))


def find_mask_rows(body: bytes, begin: int, tokens: IntRows) -> IntRows | None:
    """The masks of these tokens: in each row some that are not trained, then the very tokens. None: no such list, which is to be
    looked at by itself."""
    rows = _rows(body, begin)
    if rows is None or len(rows) != len(tokens.rows):
        return None
    masked = MASKED_SPACED if body.find(b" ", begin, rows[-1][1]) >= 0 else MASKED_CLOSE
    unit, num_negative = len(masked), 0
    for (first, last), (token_first, token_last) in zip(rows, tokens.rows, strict=True):
        begins = same = first + 1
        minus = body.rfind(b"-", begins, last)
        if minus >= 0:
            same = minus + unit
        token = token_last - last + same
        num_masked = body.count(b",", token_first, token)
        # What is not trained comes first, the rest begins where a token begins, and as many tokens stand before it as are masked.
        if (
            same >= last
            or token <= token_first
            or body[token - 1] not in BEFORE_NUMBER
            or body[begins:same] != masked * num_masked
            or body[same:last] != body[token:token_last]
        ):
            return None
        num_negative += num_masked
    return IntRows(begin, rows[-1][1] + 2, rows, tokens.lengths, num_negative)


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
