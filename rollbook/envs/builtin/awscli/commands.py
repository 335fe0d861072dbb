"""What the agent typed: find the command in its words, split it as a shell would, and refuse what a shell would do with it.

Nothing here touches the environment. A refusal is an answer to the agent, in words it can act on, and never an exception.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

MAX_LINE_CHARS = 20_000
THINKING = re.compile(r"<think>.*?(</think>|\Z)", re.DOTALL)
# What people and models put before a command: a bullet, a number, a prompt, ticks.
DECORATION = re.compile(r"(?:[-*>]\s+|\d+[.)]\s+)?(`*)\s*(?:\$\s+)?")
# The pieces a shell would see, in the order in which they are tried.
PIECES = re.compile(
    r"""(?P<blank>\s+) | (?P<comment>(?<!\S)\#.*) | (?P<single>'[^']*') | (?P<double>"(?:[^"\\]|\\.)*") | (?P<escaped>\\.)
      | (?P<open>['"]) | (?P<operator>[|;&<>()]) | (?P<active>`|\$[A-Za-z_{(]) | (?P<plain>[^\s'"\\|;&<>()`$]+|[\\$])""",
    re.DOTALL | re.VERBOSE,
)
ACTIVE_IN_DOUBLE = re.compile(r"(?<!\\)(?:`|\$[A-Za-z_{(])")
ESCAPED_IN_DOUBLE = re.compile(r"\\([\"\\$`])")
REFUSED_PIECES = {
    "open": "the quote {0} is opened and never closed",
    "operator": "there is no shell: {0!r} is not available. Run one aws command at a time, without pipes, redirections or lists "
    "of commands",
    "active": "there is no shell: variables and command substitution are not available. Put text with $ or ` into single quotes",
}
UNQUOTED: dict[str, Callable[[str], str]] = {
    "single": lambda text: text[1:-1],
    "double": lambda text: ESCAPED_IN_DOUBLE.sub(r"\1", text[1:-1]),
    "escaped": lambda text: text[1:],
    "plain": lambda text: text,
}
# Options that would leave the sandbox, or change who is asking. argparse accepts every unambiguous beginning of a name.
REFUSED_OPTIONS = {
    "--endpoint-url": "the endpoint is fixed",
    "--profile": "there are no profiles",
    "--ca-bundle": "certificates are fixed",
    "--no-verify-ssl": "certificates are fixed",
    "--no-sign-request": "every request is signed",
    "--debug": "debug output is off",
}
SHORTEST_PREFIX = 6
REFUSED_SERVICES = {"configure": "the configuration is fixed", "history": "there is no history"}
LOCAL_PREFIXES = ("file://", "fileb://")
READING = re.compile(
    r"(?:list|describe|get|head|lookup|search|batch-get|select|scan|query|view|ls|wait|help|check|detect)(?:-|$)"
)
# Named like a question, and yet they change something.
CHANGING = frozenset({"get-login", "get-session-token"})


class Verb(StrEnum):
    AWS = "aws"
    HINT = "hint"
    ANSWER = "answer"


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One move. `argv` is what follows `aws`; `text` the line as it was understood; `skipped` lines were not run."""

    verb: Verb
    text: str
    argv: tuple[str, ...] = ()
    skipped: int = 0

    @property
    def is_read_only(self) -> bool:
        """Certainly changes nothing. What is not certain counts as a change."""
        words = [word for word in self.argv if not word.startswith("-")]
        if self.argv[-1:] == ("help",):
            return True
        return len(words) > 1 and words[1] not in CHANGING and READING.match(words[1]) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Why nothing was run, and what to type instead."""

    text: str


def understand(action: str, *, may_answer: bool = True) -> Command | Refusal:
    """The agent's move, from all it said: the first line that is a command. Lines that end with a backslash go on.

    `may_answer` is False where nothing was asked: there a line that begins with "answer" is only talk.
    """
    lines = _command_lines(action, may_answer=may_answer)
    if not lines:
        return Refusal(
            text="no command found: write one line that begins with `aws`, for example: aws s3api list-buckets"
        )
    line, skipped = lines[0], len(lines) - 1
    if len(line) > MAX_LINE_CHARS:
        return Refusal(text=f"the command has {len(line)} characters; at most {MAX_LINE_CHARS} are read")
    verb = Verb(line.split(maxsplit=1)[0])
    if verb is not Verb.AWS:
        rest = line.split(maxsplit=1)[1:]
        return Command(verb=verb, text=line, argv=tuple(rest), skipped=skipped)
    words = split(line)
    if isinstance(words, Refusal):
        return words
    refusal = _refused(words[1:])
    return refusal or Command(verb=verb, text=line, argv=tuple(words[1:]), skipped=skipped)


def _command_lines(action: str, *, may_answer: bool) -> list[str]:
    text = THINKING.sub("", action).replace("\\\r\n", " ").replace("\\\n", " ")
    found = []
    for raw in text.splitlines():
        line = raw.strip()
        decoration = DECORATION.match(line)
        assert decoration is not None  # every part of the pattern is optional
        line = line[decoration.end() :]
        if decoration[1]:  # a tick at the end belongs to one at the beginning, else it may end a query
            line = line.rstrip("`").rstrip()
        first = line.split(maxsplit=1)[0] if line else ""
        is_answer = may_answer and first == Verb.ANSWER and line != Verb.ANSWER
        if first == Verb.AWS or line == Verb.HINT or is_answer:
            found.append(line)
    return found


def split(line: str) -> list[str] | Refusal:
    """Words of a line: quotes and backslashes as in a shell; whatever a shell would *do* (pipes, variables, ...) is refused."""
    words: list[str] = []
    word: str | None = None
    for piece in PIECES.finditer(line):
        kind, text = str(piece.lastgroup), piece[0]
        if kind in REFUSED_PIECES or (kind == "double" and ACTIVE_IN_DOUBLE.search(text)):
            return Refusal(text=REFUSED_PIECES.get(kind, REFUSED_PIECES["active"]).format(text))
        if kind in {"blank", "comment"}:
            words += [] if word is None else [word]
            word = None
        else:
            word = (word or "") + UNQUOTED[kind](text)
    return words if word is None else [*words, word]


def _refused(argv: list[str]) -> Refusal | None:
    if not argv:
        return Refusal(
            text="`aws` alone does nothing: name a service and an operation, for example: aws s3api list-buckets"
        )
    for word in argv:
        option = word.partition("=")[0]
        if option.startswith("--") and len(option) >= SHORTEST_PREFIX:
            for name, why in REFUSED_OPTIONS.items():
                if name.startswith(option):
                    return Refusal(text=f"{option} is not available: {why}")
        if word.startswith(LOCAL_PREFIXES) or word.partition("=")[2].startswith(LOCAL_PREFIXES):
            return Refusal(text=f"{word!r}: files are out of reach as parameters; give the value itself")
    service = next((word for word in argv if not word.startswith("-")), "")
    if service in REFUSED_SERVICES:
        return Refusal(text=f"aws {service} is not available: {REFUSED_SERVICES[service]}")
    if service == "s3":
        for word in argv[1:]:
            if not word.startswith(("s3://", "-")) and (word.startswith(("/", "~")) or ".." in word.split("/")):
                return Refusal(text=f"{word!r}: local paths must stay inside the working directory")
    return None
