"""Ten times the text takes about ten times the work, for every parser of sampled text and every repetition of its signs."""

import contextlib
import itertools
import re
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.architecture.test_text_parsers import PARSERS

SIGNS = (
    " ",
    "\n",
    "\n\n(",
    "a",
    "1",
    "1,",
    ".",
    "/",
    "-- ",
    "{",
    "}",
    "[",
    '{"a":',
    '"',
    "'",
    "\\",
    "`",
    "```\n",
    "$ ",
    "#",
    "#### ",
    "?",
    "<",
    "<tool_call>",
    "<tool_call> {",
    "</tool_call>",
    "<parameter=a>1</parameter>",
    "f(x=1), ",
    "{};",
    "<think>",
    "</think>",
    "<answer>",
    "<answer> a",
    "</answer>",
    "\\boxed{",
    "\\text{",
    "\\frac{1}{",
    "answer is ",
    "aws s3 ls\n",
    "aws 'a'",
    "Task: ",
    "\nMoves: 1",
    "usage: ",
    "error: ",
    "(a)\n",
    "The task is solved.\n",
    "<eos>",
    "\u2063",
    "é",
)
SIZES = (300, 3_000, 30_000)
STREAMS = {
    "contracts/output_formats.py:feed",
    "contracts/output_formats.py:IncrementalDecoder",
    "inference/server/text.py:ToolCallStream",
}
"""Get one character at a time, so the longest text would take too long."""
NOISE_S = 0.03
"""Times below this are not compared: they are mostly the timer, the garbage collector and other processes."""
MAX_GROWTH = 25
"""Of the time for ten times the text: 10 if it is linear, 100 if it is quadratic."""


def _calls(parse: Callable[[str], Any], text: str) -> int:
    """Calls of functions, of Python and C: the same in every run."""
    count = 0

    def profile(*_: object) -> None:
        nonlocal count
        count += 1

    sys.setprofile(profile)
    try:
        parse(text)
    except (ValueError, RecursionError):
        pass
    finally:
        sys.setprofile(None)
    return count


def _seconds(parse: Callable[[str], Any], text: str) -> float:
    began = time.thread_time()
    with contextlib.suppress(ValueError, RecursionError):
        parse(text)
    return time.thread_time() - began


def check_growth(parse: Callable[[str], Any], sign: str, *, ending: str = "", sizes: tuple[int, ...] = SIZES) -> None:
    texts = [sign * (size // len(sign)) + ending for size in sizes]
    counts = [_calls(parse, text) for text in texts[:2]]
    assert counts[1] <= 15 * counts[0] + 500, f"{sign!r}: {counts[0]} calls, then {counts[1]} for ten times the text"
    for small, large in itertools.pairwise(texts):
        if _seconds(parse, large) < NOISE_S:
            continue
        times = [min(_seconds(parse, text) for _ in range(3)) for text in (small, large)]
        assert times[1] <= MAX_GROWTH * max(times[0], NOISE_S / 10), (
            f"{sign!r}: {times[0]:.4f} s, then {times[1]:.4f} s"
        )


@pytest.mark.parametrize("name", PARSERS)
def test_the_work_of_a_parser_grows_with_the_length_of_the_text(name: str) -> None:
    for sign in SIGNS:
        check_growth(PARSERS[name], sign, sizes=(100, 1_000) if name in STREAMS else SIZES)


@pytest.mark.slow
@pytest.mark.parametrize("name", PARSERS)
def test_the_work_grows_with_the_length_for_pairs_of_signs_and_for_every_ending(name: str) -> None:
    sizes = SIZES[:2]
    for first, second in itertools.product(SIGNS, repeat=2):
        check_growth(PARSERS[name], first + second, sizes=sizes)
        check_growth(PARSERS[name], first, ending=second, sizes=sizes)


def test_a_quadratic_search_and_a_quadratic_loop_are_recognised() -> None:
    with pytest.raises(AssertionError, match="s, then"):
        check_growth(re.compile(r"\s+x").search, " ", sizes=(1_000, 10_000))
    with pytest.raises(AssertionError, match="calls, then"):
        check_growth(lambda text: [text[at:].find("x") for at in range(len(text)) for _ in range(at // 10)], " ")
