r"""Is this the right answer? Decided by numbers where both are numbers, by `math-verify` where there is more to them.

It never raises and never takes long: replies are written by a policy that is still learning, so anything may stand in them. Numbers
are compared here. What needs a computer algebra system (`\frac{\sqrt{2}}{2}`) is judged in a process of its own, which is killed
and replaced when it does not answer in time; then, and where `math-verify` is not installed, the texts are compared.
"""

import asyncio
import importlib
import importlib.util
import multiprocessing
from multiprocessing.connection import Connection

from rollbook.envs.builtin.maths_answers import as_number, final_answer, is_same_answer

MAX_CHARS = 2_000
"""An answer longer than this is no answer; parsing it would only take time."""
HAS_MATH_VERIFY = importlib.util.find_spec("math_verify") is not None


class Scorer:
    """One for each worker process. Safe for many episodes at a time: the judging process takes them one by one."""

    def __init__(self, *, timeout_s: float = 5.0, is_lenient: bool = False) -> None:
        """`is_lenient`: the last number of a reply counts as its answer, also where none is boxed."""
        self._timeout_s = timeout_s
        self._is_lenient = is_lenient
        self._turn: asyncio.Lock | None = None
        self._judge: _Judge | None = None

    async def is_right(self, reply: str, expected: str) -> bool:
        """Whether the final answer of `reply` is `expected` (which may be a GSM8K solution with `#### 72`)."""
        wanted = _expected(expected)
        given = final_answer(reply, is_lenient=self._is_lenient)
        if not given or len(given) > MAX_CHARS or len(wanted) > MAX_CHARS:
            return False
        if as_number(given) is not None and as_number(wanted) is not None:
            return is_same_answer(given, wanted)
        if is_same_answer(given, wanted):
            return True
        return HAS_MATH_VERIFY and await self._asked(given, wanted)

    async def _asked(self, given: str, wanted: str) -> bool:
        self._turn = self._turn or asyncio.Lock()
        async with self._turn:
            if self._judge is None:
                self._judge = await asyncio.to_thread(_Judge)
            answer = await asyncio.to_thread(self._judge.ask, given, wanted, self._timeout_s)
            if answer is None:
                self._judge.kill()
                self._judge = None
            return bool(answer)


class _Judge:
    """The process with the computer algebra system in it."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._ours, theirs = context.Pipe()
        self._process = context.Process(target=judge, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()
        # Importing the algebra system takes seconds; that is not the answer's fault.
        self._ours.poll(60.0)
        self._ours.recv()

    def ask(self, given: str, wanted: str, timeout_s: float) -> bool | None:
        """None: it did not answer in time, or died."""
        try:
            self._ours.send((given, wanted))
            return bool(self._ours.recv()) if self._ours.poll(timeout_s) else None
        except (EOFError, OSError):
            return None

    def kill(self) -> None:
        self._process.kill()
        self._process.join()
        self._ours.close()


def judge(pipe: Connection) -> None:
    """Answer questions until the other side is gone."""
    library = importlib.import_module("math_verify")  # only this process pays for it
    parse, verify = library.parse, library.verify

    pipe.send(True)
    while True:
        try:
            given, wanted = pipe.recv()
        except EOFError:
            return
        try:
            # No timeouts of its own: they need signals, and this process may be killed instead.
            found = [parse(f"${text}$", parsing_timeout=None, raise_on_error=False) for text in (wanted, given)]
            is_right = all(found) and verify(found[0], found[1], timeout_seconds=None)
        except Exception:
            # A parser that trips over a strange answer has judged it.
            is_right = False
        pipe.send(bool(is_right))


def _expected(text: str) -> str:
    return (final_answer(text) or text) if "####" in text else text
