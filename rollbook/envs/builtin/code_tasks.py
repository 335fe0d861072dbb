"""Generated tasks of the environment `code`: twenty functions in five tiers, each with several constants, to write or to repair.

    [tasks]
    source = "rollbook.envs.builtin.code_tasks:tasks"

A task has `goal`, `function`, `start` (the module to repair, or an empty one), `examples` (shown), `tests` (hidden: arguments and
the value that the reference solution returns) and `solution`.
"""

import json
import random
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

NUM_TESTS = 12
NUM_EXAMPLES = 2
MAX_DRAWS = 400
"""Draws of arguments until one shows the mistake of a module to repair."""
WORDS = ("ant", "bee", "cat", "dog", "elk", "fox", "gnu", "hen", "ibis", "jay")


@dataclass(frozen=True, slots=True)
class CodeFamily:
    """One function. `K` in its texts is the constant of a task; `mistake` replaces a part of the solution."""

    tier: int
    name: str
    goal: str
    solution: str
    mistake: tuple[str, str]
    draw: Callable[[random.Random], list[Any]]


def tasks(
    *, constants: Sequence[int] = (2, 3, 4, 5, 6, 7), tiers: Sequence[int] = (1, 2, 3, 4, 5), seed: int = 0
) -> Iterator[dict[str, Any]]:
    """One task to write and one to repair for each function and constant: 240 with the default constants."""
    for family in FAMILIES:
        if family.tier not in tiers:
            continue
        for constant in constants:
            for kind in ("write", "repair"):
                yield _task(family, constant, kind, seed)


def _task(family: CodeFamily, constant: int, kind: str, seed: int) -> dict[str, Any]:
    rng = random.Random(f"{family.name}/{constant}/{kind}/{seed}")
    solution = _with_constant(textwrap.dedent(family.solution).strip() + "\n", constant)
    right_part, wrong_part = (_with_constant(part, constant) for part in family.mistake)
    wrong = solution.replace(right_part, wrong_part, 1)
    cases = _cases(family, solution, wrong, rng)
    goal = _with_constant(family.goal, constant)
    if kind == "repair":
        goal = f"The function {family.name} has a mistake. Correct it. What it must do: {goal}"
    return {
        "id": f"code-{family.name}-{constant}-{kind}",
        "tier": family.tier,
        "kind": kind,
        "goal": goal,
        "function": family.name,
        "start": wrong if kind == "repair" else "",
        "examples": cases[:NUM_EXAMPLES],
        "tests": cases,
        "solution": solution,
    }


def _cases(family: CodeFamily, solution: str, wrong: str, rng: random.Random) -> list[dict[str, Any]]:
    """Arguments with their values. At least one of them shows the mistake, and values differ, so that no constant passes."""
    right, mistaken = (_function(code, family.name) for code in (solution, wrong))
    cases: list[dict[str, Any]] = []
    shows_mistake = False
    for _ in range(MAX_DRAWS):
        args = family.draw(rng)
        # Each call gets its own copy, as each call in a sandbox does.
        value = right(*json.loads(json.dumps(args)))
        is_shown = _outcome(mistaken, args) != value
        if len(cases) == NUM_TESTS - 1 and not (is_shown or shows_mistake):
            continue
        shows_mistake = shows_mistake or is_shown
        cases.append({"args": args, "value": json.loads(json.dumps(value))})
        if len(cases) == NUM_TESTS:
            break
    assert shows_mistake, f"{family.name}: no arguments show the mistake"
    assert len({json.dumps(case["value"]) for case in cases}) > 1, f"{family.name}: all values are the same"
    return cases


def _outcome(function: Callable[..., Any], args: list[Any]) -> Any:
    try:
        return function(*json.loads(json.dumps(args)))
    except Exception as error:
        return repr(error)


def _function(code: str, name: str) -> Callable[..., Any]:
    """A function of this module's own texts; nothing that a model wrote is run here."""
    namespace: dict[str, Any] = {}
    exec(code, namespace)
    function: Callable[..., Any] = namespace[name]
    return function


def _with_constant(text: str, constant: int) -> str:
    return text.replace("K", str(constant))


def _numbers(rng: random.Random, low: int = -20, high: int = 40, most: int = 9) -> list[int]:
    return [rng.randint(low, high) for _ in range(rng.randint(1, most))]


def _text(rng: random.Random, most: int = 12) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(rng.randint(1, most)))


def _intervals(rng: random.Random) -> list[list[int]]:
    starts = [rng.randint(0, 60) for _ in range(rng.randint(1, 7))]
    return [[start, start + rng.randint(1, 9)] for start in starts]


def _grid(rng: random.Random) -> list[str]:
    rows, columns = rng.randint(2, 5), rng.randint(3, 6)
    cells = [["#" if rng.random() < 0.65 else "." for _ in range(columns)] for _ in range(rows)]
    cells[0][0] = cells[-1][-1] = "."
    return ["".join(row) for row in cells]


def _polish(rng: random.Random) -> str:
    words = [str(rng.randint(1, 30))]
    for _ in range(rng.randint(1, 5)):
        words += [str(rng.randint(1, 30)), rng.choice("+-*")]
    return " ".join(words)


FAMILIES: tuple[CodeFamily, ...] = (
    CodeFamily(
        1,
        "scaled_sum",
        "scaled_sum(numbers) returns K times the sum of the numbers.",
        "def scaled_sum(numbers):\n    return K * sum(numbers)",
        ("K * sum", "K + sum"),
        lambda rng: [_numbers(rng)],
    ),
    CodeFamily(
        1,
        "clamped",
        "clamped(x) returns x, but at least 0 and at most K.",
        "def clamped(x):\n    return max(0, min(K, x))",
        ("max(0, min(K, x))", "min(K, x)"),
        lambda rng: [rng.randint(-10, 15)],
    ),
    CodeFamily(
        1,
        "count_multiples",
        "count_multiples(numbers) returns how many of the whole numbers are divisible by K.",
        "def count_multiples(numbers):\n    return sum(1 for n in numbers if n % K == 0)",
        ("n % K == 0", "n > K"),
        lambda rng: [_numbers(rng)],
    ),
    CodeFamily(
        1,
        "shorten",
        "shorten(text) returns the first K characters of the text, followed by '...' if there were more.",
        "def shorten(text):\n    return text if len(text) <= K else text[:K] + '...'",
        ("len(text) <= K", "len(text) < K"),
        lambda rng: ["abcdefghij"[: rng.randint(0, 10)]],
    ),
    CodeFamily(
        2,
        "every_nth",
        "every_nth(items) returns the list of every K-th item: the K-th, the 2*K-th and so on, counted from 1.",
        "def every_nth(items):\n    return items[K - 1 :: K]",
        ("[K - 1 :: K]", "[::K]"),
        lambda rng: [_numbers(rng, most=20)],
    ),
    CodeFamily(
        2,
        "shift_letters",
        "shift_letters(text) replaces each letter a to z by the letter K places later; after z comes a. Other characters stay.",
        """
        def shift_letters(text):
            shifted = ""
            for character in text:
                if "a" <= character <= "z":
                    character = chr((ord(character) - ord("a") + K) % 26 + ord("a"))
                shifted += character
            return shifted
        """,
        (" % 26 +", " +"),
        lambda rng: [f"{rng.choice(WORDS)} {rng.choice('xyz')}{rng.randint(0, 9)}"],
    ),
    CodeFamily(
        2,
        "running_totals",
        "running_totals(numbers) returns the list of the sums of the first 1, 2, 3, ... numbers, each as its remainder modulo K.",
        """
        def running_totals(numbers):
            totals, total = [], 0
            for number in numbers:
                total += number
                totals.append(total % K)
            return totals
        """,
        ("total += number", "total = number"),
        lambda rng: [_numbers(rng)],
    ),
    CodeFamily(
        2,
        "chunks",
        "chunks(items) splits the list into lists of K items, in order. The last one may be shorter.",
        "def chunks(items):\n    return [items[i : i + K] for i in range(0, len(items), K)]",
        ("range(0, len(items), K)", "range(0, len(items) - K + 1, K)"),
        lambda rng: [_numbers(rng, most=15)],
    ),
    CodeFamily(
        3,
        "frequent_words",
        "frequent_words(text) returns the K most frequent words, the most frequent first; words of equal frequency by alphabet.",
        """
        def frequent_words(text):
            counts = {}
            for word in text.split():
                counts[word] = counts.get(word, 0) + 1
            return sorted(counts, key=lambda word: (-counts[word], word))[:K]
        """,
        ("(-counts[word], word)", "(counts[word], word)"),
        lambda rng: [_text(rng, 25)],
    ),
    CodeFamily(
        3,
        "by_remainder",
        "by_remainder(numbers) returns a dictionary from each remainder modulo K, as a string, to the sorted list of its numbers.",
        """
        def by_remainder(numbers):
            groups = {}
            for number in sorted(numbers):
                groups.setdefault(str(number % K), []).append(number)
            return groups
        """,
        ("sorted(numbers)", "numbers"),
        lambda rng: [_numbers(rng)],
    ),
    CodeFamily(
        3,
        "merged",
        "merged(intervals) joins intervals [start, end] that overlap or whose gap is at most K, and returns them sorted by start.",
        """
        def merged(intervals):
            result = []
            for start, end in sorted(intervals):
                if result and start - result[-1][1] <= K:
                    result[-1][1] = max(result[-1][1], end)
                else:
                    result.append([start, end])
            return result
        """,
        ("in sorted(intervals)", "in intervals"),
        lambda rng: [_intervals(rng)],
    ),
    CodeFamily(
        3,
        "window_means",
        "window_means(numbers) returns the mean of each K neighbouring numbers, rounded down, in order.",
        """
        def window_means(numbers):
            return [sum(numbers[i : i + K]) // K for i in range(len(numbers) - K + 1)]
        """,
        ("len(numbers) - K + 1", "len(numbers) - K"),
        lambda rng: [_numbers(rng, most=14)],
    ),
    CodeFamily(
        4,
        "longest_calm",
        "longest_calm(numbers) returns the length of the longest part of neighbouring numbers in which each differs from the one "
        "before it by at most K.",
        """
        def longest_calm(numbers):
            best = length = 0
            for i, number in enumerate(numbers):
                length = length + 1 if i and abs(number - numbers[i - 1]) <= K else 1
                best = max(best, length)
            return best
        """,
        ("best = max(best, length)", "best = length"),
        lambda rng: [_numbers(rng, 0, 12, 14)],
    ),
    CodeFamily(
        4,
        "best_sum",
        "best_sum(numbers, most) returns the largest sum that is at most `most`, where each number may be used up to K times.",
        """
        def best_sum(numbers, most):
            sums = {0}
            for number in numbers:
                for _ in range(K):
                    sums |= {one + number for one in sums if one + number <= most}
            return max(sums)
        """,
        ("range(K)", "range(1)"),
        lambda rng: [[rng.randint(2, 12) for _ in range(rng.randint(1, 4))], rng.randint(5, 60)],
    ),
    CodeFamily(
        4,
        "in_base",
        "in_base(n) returns the whole number n in base K as a string, with a minus sign for negative ones; 0 is '0'.",
        """
        def in_base(n):
            digits, rest = "", abs(n)
            while rest:
                digits = str(rest % K) + digits
                rest //= K
            return ("-" if n < 0 else "") + (digits or "0")
        """,
        ("str(rest % K) + digits", "digits + str(rest % K)"),
        lambda rng: [rng.randint(-300, 300)],
    ),
    CodeFamily(
        4,
        "polish",
        "polish(expression) evaluates an expression in reverse Polish notation, words separated by blanks, with the operators "
        "+ - * on whole numbers; each result is reduced modulo 10**K.",
        """
        def polish(expression):
            stack = []
            for word in expression.split():
                if word in ("+", "-", "*"):
                    right, left = stack.pop(), stack.pop()
                    result = left + right if word == "+" else left - right if word == "-" else left * right
                    stack.append(result % 10**K)
                else:
                    stack.append(int(word))
            return stack[-1]
        """,
        ("left - right", "right - left"),
        lambda rng: [_polish(rng)],
    ),
    CodeFamily(
        5,
        "cache_hits",
        "cache_hits(keys) returns, for each key in order, whether it was in a cache of the K most recently used keys then.",
        """
        def cache_hits(keys):
            recent, hits = [], []
            for key in keys:
                hits.append(key in recent)
                if key in recent:
                    recent.remove(key)
                recent.append(key)
                del recent[:-K]
            return hits
        """,
        ("recent.remove(key)", "continue"),
        lambda rng: [[rng.choice("abcdefghijk"[: rng.randint(4, 11)]) for _ in range(rng.randint(12, 40))]],
    ),
    CodeFamily(
        5,
        "edit_cost",
        "edit_cost(a, b) returns the lowest cost of changing the string a into b, where inserting or deleting a character costs "
        "2 and replacing one costs K.",
        """
        def edit_cost(a, b):
            row = [2 * j for j in range(len(b) + 1)]
            for i, x in enumerate(a, start=1):
                above, row = row, [2 * i]
                for j, y in enumerate(b, start=1):
                    row.append(min(above[j] + 2, row[j - 1] + 2, above[j - 1] + (0 if x == y else K)))
            return row[-1]
        """,
        ("above[j] + 2, row[j - 1] + 2", "above[j] + 2, row[j - 1] + 1"),
        lambda rng: ["".join(rng.choice("abc") for _ in range(rng.randint(0, 7))) for _ in range(2)],
    ),
    CodeFamily(
        5,
        "fewest_steps",
        "fewest_steps(grid) returns the fewest steps up, down, left or right from the first cell of the first row to the last "
        "cell of the last row, or -1. Rows are strings; at most K cells with '#' may be entered.",
        """
        def fewest_steps(grid):
            rows, columns = len(grid), len(grid[0])
            reached, front, steps = {(0, 0, K)}, [(0, 0, K)], 0
            while front:
                if any((row, column) == (rows - 1, columns - 1) for row, column, _ in front):
                    return steps
                following = []
                for row, column, left in front:
                    for down, right in ((1, 0), (-1, 0), (0, 1), (0, -1)):
                        r, c = row + down, column + right
                        if 0 <= r < rows and 0 <= c < columns:
                            state = (r, c, left - (grid[r][c] == "#"))
                            if state[2] >= 0 and state not in reached:
                                reached.add(state)
                                following.append(state)
                front, steps = following, steps + 1
            return -1
        """,
        ('(grid[r][c] == "#")', "1"),
        lambda rng: [_grid(rng)],
    ),
    CodeFamily(
        5,
        "finish_times",
        "finish_times(durations) returns when each task ends if K workers take the tasks in order, each task by the worker that is "
        "free first; of several free workers, the one with the lowest number.",
        """
        def finish_times(durations):
            free, ends = [0] * K, []
            for duration in durations:
                worker = free.index(min(free))
                free[worker] += duration
                ends.append(free[worker])
            return ends
        """,
        ("free.index(min(free))", "len(ends) % K"),
        lambda rng: [[rng.randint(1, 9) for _ in range(rng.randint(8, 16))]],
    ),
)
