"""A terminal environment: the agent changes files with commands. A task is solved if the files are as expected, on any path.

A task has `goal` (the instruction), `files` (initial files, path to text) and `expect` (path to text, or to null for a file that
must not exist). A task that is already solved is refused, so that doing nothing is never rewarded.
"""

from collections.abc import Mapping
from typing import Any

from rollbook.contracts.task import Observation
from rollbook.envs.builtin.terminal.commands import COMMANDS, run_line
from rollbook.envs.builtin.terminal.files import CommandError, FileTree

MAX_OUTPUT_CHARS = 4_000


class Terminal:
    """Commands on a file tree in memory: no shell, no program and no file of the machine.

    Commands run in a thread, not in the event loop: a long one takes a second.
    """

    def __init__(self, *, max_turns: int = 12) -> None:
        if max_turns < 1:
            raise ValueError(f"max_turns is {max_turns}; a task needs at least one command")
        self._max_turns = max_turns
        self._tree: FileTree | None = None
        self._expect: dict[str, str | None] = {}
        self._lines: list[str] = []

    def reset(self, task: Mapping[str, Any]) -> Observation:
        missing = [name for name in ("goal", "expect") if name not in task]
        if missing:
            raise ValueError(f"the task lacks {', '.join(missing)}; it needs goal, expect and, optionally, files")
        tree = FileTree()
        for path, text in dict(task.get("files", {})).items():
            tree.make_directory(str(tree.path(path).parent), parents=True)
            tree.write(path, text)
        expect = {str(tree.path(path)): text for path, text in dict(task["expect"]).items()}
        self._tree, self._expect, self._lines = tree, expect, []
        if self._is_solved(tree):
            self._tree = None
            raise ValueError("the task is solved at the start; doing nothing must not be rewarded")
        known = ", ".join(sorted(COMMANDS))
        return Observation(
            text=f"{task['goal']}\nYou are in {tree.cwd}. One command a turn; known are {known}.",
            facts=self._facts(tree),
        )

    def step(self, action: str) -> Observation:
        if self._tree is None:
            raise RuntimeError("step without a task: reset first")
        tree, line = self._tree, command_of(action)
        self._lines.append(line)
        try:
            output = run_line(tree, line)
        except CommandError as error:
            output = str(error)
        solved = self._is_solved(tree)
        done = solved or len(self._lines) >= self._max_turns
        if len(output) > MAX_OUTPUT_CHARS:
            output = f"{output[:MAX_OUTPUT_CHARS]}\n… {len(output) - MAX_OUTPUT_CHARS} more characters"
        if done:
            self._tree = None
        return Observation(
            text=output or "(no output)",
            reward=1.0 if solved else 0.0,
            done=done,
            solved=solved if done else None,
            facts=self._facts(tree),
        )

    def close(self) -> None:
        self._tree = None

    @staticmethod
    def example_tasks() -> list[dict[str, Any]]:
        """Tasks for the playground."""
        return [{name: value for name, value in row.items() if name != "solution"} for row in TASKS]

    def _is_solved(self, tree: FileTree) -> bool:
        there = dict(tree.files())
        return all(
            there.get(path) == text and not (text is None and tree.is_directory(tree.path(path)))
            for path, text in self._expect.items()
        )

    def _facts(self, tree: FileTree) -> dict[str, Any]:
        return {"commands": list(self._lines), "files": dict(tree.files())}


def command_of(action: str) -> str:
    """The command in the agent's text: the first line of its last fenced block, or else its last non-empty line."""
    blocks = action.split("```")
    text = blocks[-2].partition("\n")[2] if len(blocks) >= 3 else action
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines:
        return ""
    return (lines[0] if len(blocks) >= 3 else lines[-1]).removeprefix("$ ").strip("`")


TASKS: tuple[dict[str, Any], ...] = (
    {
        "id": "terminal-write",
        "goal": "Write the word hello into the file greeting.txt.",
        "files": {},
        "expect": {"greeting.txt": "hello\n"},
        "solution": ["echo hello > greeting.txt"],
    },
    {
        "id": "terminal-rename",
        "goal": "Rename draft.txt to final.txt.",
        "files": {"draft.txt": "all of it\n"},
        "expect": {"draft.txt": None, "final.txt": "all of it\n"},
        "solution": ["mv draft.txt final.txt"],
    },
    {
        "id": "terminal-errors",
        "goal": "Collect every line of app.log with the word ERROR in errors.txt, in their order.",
        "files": {"app.log": "INFO up\nERROR disk\nINFO on\nERROR net\n"},
        "expect": {"errors.txt": "ERROR disk\nERROR net\n"},
        "solution": ["cat app.log", "grep ERROR app.log > errors.txt"],
    },
    {
        "id": "terminal-count",
        "goal": "Write how many different names names.txt has into count.txt, only the number.",
        "files": {"names.txt": "bo\nal\nbo\ncy\nal\n"},
        "expect": {"count.txt": "3\n"},
        "solution": ["sort -u names.txt | wc -l > count.txt"],
    },
    {
        "id": "terminal-tidy",
        "goal": "Move every .txt file of the inbox into archive/2024 and remove the inbox.",
        "files": {"inbox/a.txt": "a\n", "inbox/b.txt": "b\n"},
        "expect": {"inbox": None, "archive/2024/a.txt": "a\n", "archive/2024/b.txt": "b\n"},
        "solution": ["mkdir -p archive/2024", "mv inbox/a.txt inbox/b.txt archive/2024", "rm -r inbox"],
    },
    {
        "id": "terminal-largest",
        "goal": "Write the two largest numbers of data/numbers.txt, largest first, into top.txt.",
        "files": {"data/numbers.txt": "7\n100\n31\n8\n"},
        "expect": {"top.txt": "100\n31\n"},
        "solution": ["find . -name '*.txt'", "sort -rn data/numbers.txt | head -n 2 > top.txt"],
    },
)
"""Example tasks, each with a solution that the tests run. The agent never sees `solution`."""
