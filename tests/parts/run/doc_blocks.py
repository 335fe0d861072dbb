"""The code blocks of a documentation page, and a program that executes them.

    python -m tests.parts.run.doc_blocks PAGE [--slow]

Shell and Python blocks of a page run in order, in one directory and one namespace. A block whose first line is a comment with a
file name (`# lock.py`, `# run.toml`) is also written to that file, for later blocks. A comment before a block makes an exception:

    <!-- not run: REASON -->    never executed, for what needs a GPU, a network, or runs until it is stopped
    <!-- slow: REASON -->       executed with --slow only, for what takes longer than a few seconds
"""

import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LANGUAGES = ("sh", "python", "toml")
ALLOWED_COMMANDS = {"rollbook", "python", "pytest", "cd", "mkdir"}
"""A block with any other command (an installation, a kill) changes more than its directory and must be marked as not run."""
_BLOCK = re.compile(
    r"(?:^<!-- (?P<mark>not run|slow): (?P<reason>.+?) -->\n\n?)?^```(?P<language>\w+)\n(?P<code>.*?)^```$", re.M | re.S
)
_FILE_NAME = re.compile(r"# ([\w/]+\.(?:py|toml))\n")


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    page: Path
    line: int
    language: str
    code: str
    mark: str | None
    """`not run`, `slow`, or None."""

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"

    @property
    def file_name(self) -> str | None:
        match = _FILE_NAME.match(self.code)
        return None if match is None else match[1]

    def commands(self) -> Iterator[list[str]]:
        """The words of each command of a shell block, without comments."""
        for line in self.code.replace("\\\n", " ").splitlines():
            if words := re.sub(r"(^|\s)#.*", "", line).split():
                yield words


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [
        Block(
            page=page,
            line=text.count("\n", 0, match.start("code")),
            language=match["language"],
            code=match["code"],
            mark=match["mark"],
        )
        for match in _BLOCK.finditer(text)
        if match["language"] in LANGUAGES
    ]


def run_blocks(page: Path, *, with_slow: bool) -> None:
    namespace: dict[str, Any] = {}
    sys.path.insert(0, str(Path.cwd()))
    for block in blocks_of(page):
        if block.mark == "not run" or (block.mark == "slow" and not with_slow):
            continue
        if block.file_name is not None:
            Path(block.file_name).parent.mkdir(parents=True, exist_ok=True)
            Path(block.file_name).write_text(block.code, encoding="utf-8")
        if block.language == "sh":
            strays = {words[0] for words in block.commands()} - ALLOWED_COMMANDS
            if strays:
                raise SystemExit(
                    f"{block}: {', '.join(sorted(strays))}: add a comment `<!-- not run: REASON -->` before the block"
                )
            sys.stdout.write(f"--- {block}\n{block.code}")
            sys.stdout.flush()
            subprocess.run(["sh", "-e", "-c", block.code], check=True)
        elif block.language == "python":
            # A file is imported, not run as a program.
            name = "__main__" if block.file_name is None else block.file_name.removesuffix(".py").replace("/", ".")
            namespace["__name__"] = name
            exec(compile(block.code, str(block), "exec"), namespace)


if __name__ == "__main__":
    run_blocks(Path(sys.argv[1]), with_slow="--slow" in sys.argv[2:])
