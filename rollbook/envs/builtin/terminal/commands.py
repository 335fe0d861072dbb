"""The commands of the terminal environment, implemented on a file tree in memory, without a shell or a program of the machine."""

import fnmatch
import re
import shlex
from collections.abc import Callable, Sequence
from pathlib import PurePosixPath

from rollbook.envs.builtin.terminal.files import MAX_BYTES, CommandError, FileTree

MAX_COMMAND_CHARS = 4_000
Command = Callable[[FileTree, list[str], str], str]


def run_line(tree: FileTree, line: str) -> str:
    """Run one line with commands, pipes, `>` and `>>`. Returns its output; raises `CommandError` with the error of a terminal."""
    if len(line) > MAX_COMMAND_CHARS:
        raise CommandError(f"a command has at most {MAX_COMMAND_CHARS} characters")
    lexer = shlex.shlex(line, posix=True, punctuation_chars="|><&;()")
    lexer.whitespace_split = True
    lexer.commenters = ""
    try:
        words = list(lexer)
    except ValueError as error:
        raise CommandError(f"syntax error: {error}") from error
    tree.start_line()
    output = ""
    stage: list[str] = []
    for position, word in enumerate(words):
        if word in {">", ">>"}:
            if position + 2 != len(words):
                raise CommandError(f"syntax error: {word} must be followed by exactly one file name")
            tree.write(words[position + 1], _run(tree, stage, output), append=word == ">>")
            return ""
        if word == "|":
            output, stage = _run(tree, stage, output), []
        elif set(word) <= set("|><&;()"):
            raise CommandError(f"syntax error: {word!r} is not supported; use |, > and >>")
        else:
            stage.append(word)
    return _run(tree, stage, output)


def _run(tree: FileTree, words: Sequence[str], stdin: str) -> str:
    if not words:
        raise CommandError("syntax error: a command is missing")
    command = COMMANDS.get(words[0])
    if command is None:
        raise CommandError(f"{words[0]}: command not found; available are {', '.join(sorted(COMMANDS))}")
    try:
        output = command(tree, list(words[1:]), stdin)
        if len(output) > MAX_BYTES:
            raise CommandError(f"the output has {len(output)} characters; the limit is {MAX_BYTES}")
        tree.count_work(chars=len(output), lines=output.count("\n"))
    # An unexpected error is shown to the agent: it must not be able to end an episode that it would lose.
    except (CommandError, ValueError, ArithmeticError, LookupError) as error:
        raise CommandError(f"{words[0]}: {error}") from error
    return output


def _split(args: list[str], known: str) -> tuple[set[str], list[str]]:
    """The one-letter flags, and the other arguments."""
    flags: set[str] = set()
    rest: list[str] = []
    for arg in args:
        if len(arg) > 1 and arg[0] == "-" and not arg[1:].isdecimal():
            flags |= set(arg[1:])
        else:
            rest.append(arg)
    if unknown := sorted(flags - set(known)):
        raise CommandError(f"the option -{unknown[0]} is not supported")
    return flags, rest


def _inputs(tree: FileTree, names: list[str], stdin: str) -> list[tuple[str, str]]:
    return [(name, tree.read(name)) for name in names] or [("", stdin)]


def _lines(lines: Sequence[str]) -> str:
    return "".join(f"{line}\n" for line in lines)


def pwd(tree: FileTree, args: list[str], stdin: str) -> str:
    return f"{tree.cwd}\n"


def cd(tree: FileTree, args: list[str], stdin: str) -> str:
    target = tree.path(args[0] if args else "/home")
    if not tree.is_directory(target):
        raise CommandError(f"{args[0]}: {'Not a directory' if tree.is_file(target) else 'No such file or directory'}")
    tree.cwd = target
    return ""


def ls(tree: FileTree, args: list[str], stdin: str) -> str:
    flags, names = _split(args, "la1")
    shown: list[str] = []
    for name in names or ["."]:
        path = tree.path(name)
        if tree.is_file(path):
            shown.append(name)
        elif tree.is_directory(path):
            shown += [
                p.name + ("/" if tree.is_directory(p) else "")
                for p in tree.children(path)
                if "a" in flags or p.name[0] != "."
            ]
        else:
            raise CommandError(f"{name}: No such file or directory")
    return _lines(shown)


def cat(tree: FileTree, args: list[str], stdin: str) -> str:
    return "".join(text for _, text in _inputs(tree, args, stdin))


def echo(tree: FileTree, args: list[str], stdin: str) -> str:
    return " ".join(args) + "\n"


def mkdir(tree: FileTree, args: list[str], stdin: str) -> str:
    flags, names = _split(args, "p")
    for name in _some(names):
        tree.make_directory(name, parents="p" in flags)
    return ""


def touch(tree: FileTree, args: list[str], stdin: str) -> str:
    for name in _some(args):
        tree.write(name, "", append=True)
    return ""


def rm(tree: FileTree, args: list[str], stdin: str) -> str:
    flags, names = _split(args, "rf")
    for name in _some(names):
        path = tree.path(name)
        if tree.is_directory(path) and "r" not in flags:
            raise CommandError(f"{name}: Is a directory")
        if path == tree.cwd or path in tree.cwd.parents:
            raise CommandError(f"{name}: it contains the current directory")
        if not tree.is_file(path) and not tree.is_directory(path) and "f" not in flags:
            raise CommandError(f"{name}: No such file or directory")
        tree.remove(path)
    return ""


def cp(tree: FileTree, args: list[str], stdin: str) -> str:
    flags, names = _split(args, "r")
    for source, target in _pairs(tree, names):
        if tree.is_directory(source) and "r" not in flags:
            raise CommandError(f"{source}: Is a directory (use -r)")
        tree.copy(source, target)
    return ""


def mv(tree: FileTree, args: list[str], stdin: str) -> str:
    for source, target in _pairs(tree, args):
        tree.copy(source, target)
        tree.remove(source)
    return ""


def head(tree: FileTree, args: list[str], stdin: str) -> str:
    count, names = _count(args)
    return _lines("".join(text for _, text in _inputs(tree, names, stdin)).splitlines()[:count])


def tail(tree: FileTree, args: list[str], stdin: str) -> str:
    count, names = _count(args)
    lines = "".join(text for _, text in _inputs(tree, names, stdin)).splitlines()
    return _lines(lines[max(0, len(lines) - count) :])


def grep(tree: FileTree, args: list[str], stdin: str) -> str:
    """Plain text, not patterns: the agent's regular expression could block the event loop."""
    flags, rest = _split(args, "invc")
    if not rest:
        raise CommandError("the text to search for is missing")
    word = rest[0].casefold() if "i" in flags else rest[0]
    found: list[str] = []
    inputs = _inputs(tree, rest[1:], stdin)
    for name, text in inputs:
        for number, line in enumerate(text.splitlines(), start=1):
            if (word in (line.casefold() if "i" in flags else line)) != ("v" in flags):
                found.append((f"{name}:" if len(inputs) > 1 else "") + (f"{number}:" if "n" in flags else "") + line)
    return f"{len(found)}\n" if "c" in flags else _lines(found)


def wc(tree: FileTree, args: list[str], stdin: str) -> str:
    flags, names = _split(args, "lwc")
    rows = []
    for name, text in _inputs(tree, names, stdin):
        counts = {"l": len(text.splitlines()), "w": len(text.split()), "c": len(text)}
        rows.append(
            " ".join([*(str(counts[flag]) for flag in "lwc" if not flags or flag in flags), *([name] if name else [])])
        )
    return _lines(rows)


def sort(tree: FileTree, args: list[str], stdin: str) -> str:
    flags, names = _split(args, "rnu")
    lines = "".join(text for _, text in _inputs(tree, names, stdin)).splitlines()
    lines.sort(key=lambda line: (_leading_number(line), line) if "n" in flags else (0.0, line), reverse="r" in flags)
    return _lines(list(dict.fromkeys(lines)) if "u" in flags else lines)


def uniq(tree: FileTree, args: list[str], stdin: str) -> str:
    lines = "".join(text for _, text in _inputs(tree, args, stdin)).splitlines()
    return _lines([line for i, line in enumerate(lines) if i == 0 or line != lines[i - 1]])


def find(tree: FileTree, args: list[str], stdin: str) -> str:
    start, pattern = ".", "*"
    if args and not args[0].startswith("-"):
        start, args = args[0], args[1:]
    if args:
        if args[0] != "-name" or len(args) != 2 or args[1].count("*") > 4:
            raise CommandError("usage: find DIRECTORY -name PATTERN, with at most four stars")
        pattern = args[1]
    path = tree.path(start)
    if not tree.is_directory(path):
        raise CommandError(f"{start}: No such file or directory")
    found = []
    for entry in tree.below(path):
        tree.count_work(chars=len(entry.name) * len(pattern))
        if fnmatch.fnmatchcase(entry.name, pattern):
            found.append(str(entry))
    return _lines(found)


def _some(names: list[str]) -> list[str]:
    if not names:
        raise CommandError("a file name is missing")
    return names


def _pairs(tree: FileTree, names: list[str]) -> list[tuple[PurePosixPath, PurePosixPath]]:
    if len(names) < 2:
        raise CommandError("a source and a target are required")
    target = tree.path(names[-1])
    if len(names) > 2 and not tree.is_directory(target):
        raise CommandError(f"{names[-1]}: Not a directory")
    sources = [tree.path(name) for name in names[:-1]]
    for name, source in zip(names, sources, strict=False):
        if not tree.is_file(source) and not tree.is_directory(source):
            raise CommandError(f"{name}: No such file or directory")
    return [(source, target / source.name if tree.is_directory(target) else target) for source in sources]


def _count(args: list[str]) -> tuple[int, list[str]]:
    """The number of lines: `-n 3`, `-n3` or `-3`, by default 10."""
    if args and args[0] == "-n" and len(args) > 1 and args[1].isdecimal():
        return int(args[1][:9]), args[2:]
    if args and (match := re.fullmatch(r"-n?(\d{1,9})", args[0])):
        return int(match[1]), args[1:]
    return 10, args


def _leading_number(line: str) -> float:
    match = re.match(r"\s*(-?\d{1,30}(?:\.\d{1,30})?)", line)
    return float(match[1]) if match else 0.0


COMMANDS: dict[str, Command] = {
    function.__name__: function
    for function in (pwd, cd, ls, cat, echo, mkdir, touch, rm, cp, mv, head, tail, grep, wc, sort, uniq, find)
}
