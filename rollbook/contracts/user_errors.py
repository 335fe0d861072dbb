"""Errors of user code as text: the exception, and the lines of the user's own files that led to it."""

import difflib
import os
import sysconfig
import traceback
from collections.abc import Iterable
from pathlib import Path

SHOWN_FRAMES = 4
"""Innermost frames of user code in a description. Causes are stored and counted by their text, so they stay short."""
SOURCE_CHARS = 120
MESSAGE_CHARS = 400

_PACKAGE = f"{Path(__file__).resolve().parents[1]}{os.sep}"
_LIBRARIES = tuple(
    os.path.realpath(path) + os.sep
    for name in ("stdlib", "platstdlib", "purelib", "platlib")
    if (path := sysconfig.get_path(name))
)


def describe_error(error: BaseException) -> str:
    """`KeyError: 'tier'`, then the frames of user code, outermost first, in the form that editors recognise.

    Frames of this package and of libraries are left out. If a library raised the exception, its innermost frame is named last.
    """
    message = str(error)
    if len(message) > MESSAGE_CHARS:
        message = f"{message[:MESSAGE_CHARS]}…"
    lines = [f"{type(error).__name__}: {message}" if message else type(error).__name__]
    if isinstance(error, SyntaxError) and error.filename is not None:
        lines = [f"{type(error).__name__}: {error.msg}", f'  File "{error.filename}", line {error.lineno}']
        return "\n".join([*lines, *([f"    {error.text.strip()[:SOURCE_CHARS]}"] if error.text else [])])
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if is_user_file(frame.filename)]
    if not own:
        # The function belongs to an installed package, or was called with wrong arguments.
        own = [frame for frame in frames if not os.path.realpath(frame.filename).startswith(_PACKAGE)]
    if len(own) > SHOWN_FRAMES:
        lines.append(f"  ({len(own) - SHOWN_FRAMES} more frames)")
    for frame in own[-SHOWN_FRAMES:]:
        lines.append(f'  File "{frame.filename}", line {frame.lineno}, in {frame.name}')
        if frame.line:
            lines.append(f"    {frame.line[:SOURCE_CHARS]}")
    if own and (last := frames[-1]) is not own[-1]:
        file = Path(last.filename)
        lines.append(f"  raised in {file.parent.name}/{file.name}, line {last.lineno}, in {last.name}")
    return "\n".join(lines)


def is_user_file(path: str) -> bool:
    """Whether a source file belongs neither to this package nor to an installed library. Notebook cells are user code."""
    if path.startswith("<") and not path.startswith("<ipython"):
        return False
    real = os.path.realpath(path)
    return not (real.startswith((_PACKAGE, *_LIBRARIES)) or f"{os.sep}site-packages{os.sep}" in real)


def indented(text: str, by: str = "    ") -> str:
    return "\n".join(f"{by}{line}" for line in text.splitlines())


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`; did you mean 'max_steps'?`, or nothing if no known name is similar."""
    by_lower = {one.lower(): one for one in known}
    close = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.75)
    return f"; did you mean {by_lower[close[0]]!r}?" if close else ""


_CONTROLS = (*range(0x20), *range(0x7F, 0xA0), 0x2028, 0x2029, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
_VISIBLE = {code: ascii(chr(code))[1:-1] for code in _CONTROLS}
_VISIBLE_TEXT = {code: shown for code, shown in _VISIBLE.items() if chr(code) not in "\n\t"}


def visible(text: str, *, is_line: bool = True) -> str:
    r"""The text with control characters as escapes (`\x1b`): ids and model text must not control a terminal.

    `is_line`: escape line breaks and tabs too. Characters that change the direction of text count as control characters.
    """
    return text.translate(_VISIBLE if is_line else _VISIBLE_TEXT)
