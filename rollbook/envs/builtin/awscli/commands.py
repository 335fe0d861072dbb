"""Parses the agent's reply: finds the command, splits it like a shell, and refuses shell features.

Pure. A refusal is not an exception but a message to the agent that says how to correct the command.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

MAX_LINE_CHARS = 20_000
# Prefixes that people and models put before a command: a bullet, a number, a prompt, backticks.
DECORATION = re.compile(r"(?:[-*>]\s+|\d+[.)]\s+)?(`*)\s*(?:\$\s+)?")
# The tokens of a shell, in the order in which they are tried.
TOKENS = re.compile(
    r"""(?P<blank>\s+) | (?P<comment>(?<!\S)\#.*) | (?P<single>'[^']*') | (?P<double>"(?:[^"\\]|\\.)*") | (?P<escaped>\\.)
      | (?P<open>['"]) | (?P<operator>[|;&<>()]) | (?P<active>`|\$[A-Za-z_{(]) | (?P<plain>[^\s'"\\|;&<>()`$]+|[\\$])""",
    re.DOTALL | re.VERBOSE,
)
ACTIVE_IN_DOUBLE = re.compile(r"(?<!\\)(?:`|\$[A-Za-z_{(])")
ESCAPED_IN_DOUBLE = re.compile(r"\\([\"\\$`])")
REFUSED_TOKENS = {
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
# The options of the CLI that every command takes, and whether a value follows. A test compares them with the installed CLI.
GLOBAL_OPTIONS = {
    "--debug": False,
    "--endpoint-url": True,
    "--no-verify-ssl": False,
    "--no-paginate": False,
    "--output": True,
    "--query": True,
    "--profile": True,
    "--region": True,
    "--version": False,
    "--color": True,
    "--no-sign-request": False,
    "--ca-bundle": True,
    "--cli-read-timeout": True,
    "--cli-connect-timeout": True,
    "--v2-debug": False,
}
# Global options that would leave the sandbox or change the identity.
REFUSED_OPTIONS = {
    "--endpoint-url": "the endpoint is fixed",
    "--profile": "there are no profiles",
    "--ca-bundle": "certificates are fixed",
    "--no-verify-ssl": "certificates are fixed",
    "--no-sign-request": "every request is signed",
    "--debug": "debug output is off",
    "--v2-debug": "debug output is off",
}
REFUSED_SERVICES = {"configure": "the configuration is fixed", "history": "there is no history"}
LOCAL_PREFIXES = ("file://", "fileb://")
READING = re.compile(
    r"(?:list|describe|get|head|lookup|search|batch-get|select|scan|query|view|ls|wait|help|check|detect)(?:-|$)"
)
# Named like read operations, but they change something.
CHANGING = frozenset({"get-login", "get-session-token"})


class CommandVerb(StrEnum):
    AWS = "aws"
    HINT = "hint"
    ANSWER = "answer"


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One move. `argv` excludes the leading `aws`; `text` is the parsed line; `skipped` counts the unused commands after it."""

    verb: CommandVerb
    text: str
    argv: tuple[str, ...] = ()
    skipped: int = 0

    @property
    def is_read_only(self) -> bool:
        """Whether the command surely changes nothing."""
        operation = positionals(self.argv)[1:2]
        if is_help(self.argv):
            return True
        return bool(operation) and operation[0] not in CHANGING and READING.match(operation[0]) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Why no command was run, and how to correct it."""

    text: str


def parse_move(action: str, *, may_answer: bool = True) -> Command | Refusal:
    """The agent's move: the first line of the reply that is a command. A backslash at the end continues a line.

    `may_answer` is False if the task asks no question; a line that begins with "answer" is then ignored.
    """
    lines = _command_lines(action, may_answer=may_answer)
    if not lines:
        return Refusal(
            text="no command found: write one line that begins with `aws`, for example: aws s3api list-buckets"
        )
    line, skipped = lines[0], len(lines) - 1
    if len(line) > MAX_LINE_CHARS:
        return Refusal(text=f"the command has {len(line)} characters; the limit is {MAX_LINE_CHARS}")
    verb = CommandVerb(line.split(maxsplit=1)[0])
    if verb is not CommandVerb.AWS:
        rest = line.split(maxsplit=1)[1:]
        return Command(verb=verb, text=line, argv=tuple(rest), skipped=skipped)
    words = split(line)
    if isinstance(words, Refusal):
        return words
    refusal = _refused(words[1:])
    return refusal or Command(verb=verb, text=line, argv=tuple(words[1:]), skipped=skipped)


def _command_lines(action: str, *, may_answer: bool) -> list[str]:
    text = without_thinking(action).replace("\\\r\n", " ").replace("\\\n", " ")
    found = []
    for raw in text.splitlines():
        line = raw.strip()
        decoration = DECORATION.match(line)
        assert decoration is not None  # every part of the pattern is optional
        line = line[decoration.end() :]
        if decoration[1]:  # a trailing backtick closes a leading one; otherwise it may be part of a query
            line = line.rstrip("`").rstrip()
        first = line.split(maxsplit=1)[0] if line else ""
        is_answer = may_answer and first == CommandVerb.ANSWER and line != CommandVerb.ANSWER
        if first == CommandVerb.AWS or line == CommandVerb.HINT or is_answer:
            found.append(line)
    return found


def without_thinking(text: str) -> str:
    """The text without `<think>…</think>`. A block that is not closed ends with the text."""
    kept, end = [], 0
    while (begin := text.find("<think>", end)) >= 0:
        kept.append(text[end:begin])
        close = text.find("</think>", begin)
        end = len(text) if close < 0 else close + len("</think>")
    return "".join(kept) + text[end:]


def split(line: str) -> list[str] | Refusal:
    """The words of a line, with quotes and backslashes as in a shell. Shell operations (pipes, variables, ...) are refused."""
    words: list[str] = []
    word: list[str] | None = None
    for token in TOKENS.finditer(line):
        kind, text = str(token.lastgroup), token[0]
        if kind in REFUSED_TOKENS or (kind == "double" and ACTIVE_IN_DOUBLE.search(text)):
            return Refusal(text=REFUSED_TOKENS.get(kind, REFUSED_TOKENS["active"]).format(text))
        if kind in {"blank", "comment"}:
            words += [] if word is None else ["".join(word)]
            word = None
        else:
            word = word or []
            word.append(UNQUOTED[kind](text))
    return words if word is None else [*words, "".join(word)]


def matching_options(word: str, names: Iterable[str]) -> list[str]:
    """The options that a word may mean. The CLI accepts every unambiguous prefix of a name, followed by a space or by `=`."""
    option = word.partition("=")[0]
    return [name for name in names if name.startswith(option)] if option.startswith("--") else []


def positionals(argv: Sequence[str]) -> list[str]:
    """The words before the first option of an operation, without global options: the service, the operation, its arguments."""
    found: list[str] = []
    words = iter(argv)
    for word in words:
        if not word.startswith("--"):
            found.append(word)
            continue
        meant = matching_options(word, GLOBAL_OPTIONS)
        if not meant and len(found) > 1:
            break
        if any(GLOBAL_OPTIONS[name] for name in meant) and "=" not in word:
            next(words, None)
    return found


def is_help(argv: Sequence[str]) -> bool:
    """Whether the command prints help: `help`, `SERVICE help` or `SERVICE OPERATION help`, without options."""
    return argv[-1:] in (["help"], ("help",)) and len(argv) <= 3 and not any(word.startswith("-") for word in argv)


def _refused(argv: list[str]) -> Refusal | None:
    if not argv:
        return Refusal(
            text="`aws` alone does nothing: name a service and an operation, for example: aws s3api list-buckets"
        )
    for word in argv:
        if word == "--":
            return Refusal(text="-- is not available: write the options of the command without it")
        for name in matching_options(word, REFUSED_OPTIONS):
            return Refusal(text=f"{word.partition('=')[0]} is not available: {REFUSED_OPTIONS[name]}")
        if word.startswith(LOCAL_PREFIXES) or word.partition("=")[2].startswith(LOCAL_PREFIXES):
            return Refusal(text=f"{word!r}: parameters cannot be read from files; give the value itself")
    service = next(iter(positionals(argv)), "")
    if service in REFUSED_SERVICES:
        return Refusal(text=f"aws {service} is not available: {REFUSED_SERVICES[service]}")
    if service == "s3":
        for word in argv:
            if not word.startswith(("s3://", "-")) and (word.startswith(("/", "~")) or ".." in word.split("/")):
                return Refusal(text=f"{word!r}: local paths must stay inside the working directory")
    return None
