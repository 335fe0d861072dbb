r"""Extracts the final answer of a text, and compares answers.

The final answer is, in this order: the last `\boxed{…}`, the last `<answer>…</answer>`, the text after the last `####` (as in
GSM8K), the text after the last "answer is", and, if `is_lenient`, the last number of the text. Numbers are compared as fractions:
`0.5`, `1/2`, `\frac{1}{2}` and `$0.50` are equal.
"""

import re
from fractions import Fraction

# Only the end of a longer text is searched: the final answer is there, and a search must not block the event loop.
MAX_CHARS = 20_000
TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)
AFTER_HASHES = re.compile(r"####\s*([^\n]+)")
AFTER_WORDS = re.compile(r"answer\s+is:?\s*([^\n]+)", re.IGNORECASE)
NUMBER = re.compile(r"[+-]?(?:\d[\d,]{0,29}(?:\.\d{1,30})?|\.\d{1,30})(?:/\d{1,30})?")
LATEX_FRACTION = re.compile(r"\\[dt]?frac\{([^{}]{1,60})\}\{([^{}]{1,60})\}")
EXACT_NUMBER = re.compile(r"([+-]?(?:\d{1,30}(?:\.\d{1,30})?|\.\d{1,30}))(?:/([+-]?\d{1,30}(?:\.\d{1,30})?))?")
FORMATTING = re.compile(r"[$€£%,]|\\[,!; ]|\\text\{[^{}]*\}|\\left|\\right|\\%|\\\$")


def final_answer(text: str, *, is_lenient: bool = True) -> str | None:
    """The final answer of a text; None if there is none."""
    text = text[-MAX_CHARS:]
    boxed = last_boxed(text)
    if boxed is not None:
        return boxed.strip()
    for pattern in (TAGGED, AFTER_HASHES):
        if found := pattern.findall(text):
            return str(found[-1]).strip()
    if found := AFTER_WORDS.findall(text):
        numbers = NUMBER.findall(found[-1])
        return numbers[0] if numbers else str(found[-1]).strip().rstrip(".")
    numbers = NUMBER.findall(text) if is_lenient else []
    return numbers[-1] if numbers else None


def last_boxed(text: str) -> str | None:
    r"""The content of the last `\boxed{…}` with balanced braces."""
    start = text.rfind("\\boxed{")
    while start >= 0:
        depth, begin = 1, start + len("\\boxed{")
        for position in range(begin, len(text)):
            depth += {"{": 1, "}": -1}.get(text[position], 0)
            if depth == 0:
                return text[begin:position]
        start = text.rfind("\\boxed{", 0, start)
    return None


def is_same_answer(given: str, expected: str) -> bool:
    first, second = as_number(given), as_number(expected)
    if first is not None and second is not None:
        return first == second
    return plain(given) == plain(expected)


def as_number(text: str) -> Fraction | None:
    """The text as a number; None if it is not a number."""
    text = LATEX_FRACTION.sub(r"\1/\2", FORMATTING.sub("", text)).strip().rstrip(".").replace(" ", "")
    match = EXACT_NUMBER.fullmatch(text)
    if match is None:
        return None
    below = Fraction(match[2]) if match[2] else Fraction(1)
    return None if below == 0 else Fraction(match[1]) / below


def plain(text: str) -> str:
    """The text without formatting, case and extra spaces."""
    return " ".join(FORMATTING.sub("", text).casefold().split()).rstrip(".")
