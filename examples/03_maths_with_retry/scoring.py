r"""Scores answers. Never raises and has a time limit, because a policy that is still learning may write anything.

Numbers and equal texts are compared here. Other expressions (`\frac{\sqrt{2}}{2}`) are compared by `math-verify`, if it is
installed, in a separate process. The process is killed and replaced if it does not respond in time; the answer is then wrong.
"""

import asyncio
import importlib
import importlib.util
import multiprocessing
from multiprocessing.connection import Connection

from rollbook.envs.builtin.maths import as_number, final_answer, is_same_answer

MAX_CHARS = 2_000
"""A longer answer counts as wrong, so that it need not be parsed."""
HAS_MATH_VERIFY = importlib.util.find_spec("math_verify") is not None


class Scorer:
    """One for each worker process. Episodes may use it concurrently; the `math-verify` process handles one request at a time."""

    def __init__(self, *, timeout_s: float = 5.0, is_lenient: bool = False) -> None:
        """`is_lenient`: without a boxed answer, the last number of a reply counts as its answer."""
        self._timeout_s = timeout_s
        self._is_lenient = is_lenient
        self._lock: asyncio.Lock | None = None
        self._verifier: _Verifier | None = None

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
        return HAS_MATH_VERIFY and await self._verify(given, wanted)

    async def _verify(self, given: str, wanted: str) -> bool:
        self._lock = self._lock or asyncio.Lock()
        async with self._lock:
            if self._verifier is None:
                self._verifier = await asyncio.to_thread(_Verifier)
            is_equal = await asyncio.to_thread(self._verifier.request, given, wanted, self._timeout_s)
            if is_equal is None:
                self._verifier.kill()
                self._verifier = None
            return bool(is_equal)


class _Verifier:
    """The process that runs `math-verify`."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, child_end = context.Pipe()
        self._process = context.Process(target=run_verifier, args=(child_end,), daemon=True)
        self._process.start()
        child_end.close()
        # Importing the library takes seconds, which do not count against the time limit of an answer.
        self._pipe.poll(60.0)
        self._pipe.recv()

    def request(self, given: str, wanted: str, timeout_s: float) -> bool | None:
        """None: the process did not respond in time, or died."""
        try:
            self._pipe.send((given, wanted))
            return bool(self._pipe.recv()) if self._pipe.poll(timeout_s) else None
        except (EOFError, OSError):
            return None

    def kill(self) -> None:
        self._process.kill()
        self._process.join()
        self._pipe.close()


def run_verifier(pipe: Connection) -> None:
    """Respond to requests until the other end of the pipe is closed."""
    library = importlib.import_module("math_verify")  # optional and slow to import
    parse, verify = library.parse, library.verify

    pipe.send(True)
    while True:
        try:
            given, wanted = pipe.recv()
        except EOFError:
            return
        try:
            # Without the library's timeouts, which need signals: the parent kills this process instead.
            found = [parse(f"${text}$", parsing_timeout=None, raise_on_error=False) for text in (wanted, given)]
            is_right = all(found) and verify(found[0], found[1], timeout_seconds=None)
        except Exception:
            # An answer that cannot be parsed is wrong.
            is_right = False
        pipe.send(bool(is_right))


def _expected(text: str) -> str:
    return (final_answer(text) or text) if "####" in text else text
