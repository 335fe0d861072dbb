"""An environment of code: the agent writes or repairs a small Python module until hidden tests pass.

Each turn the agent sends the whole module in a fenced block. It runs in a new sandbox, which gets the arguments of the tests but
not the expected values; those are compared here. So code cannot read the answers, and printing or exiting early does not pass.
Tasks: `rollbook.envs.builtin.code_tasks`.
"""

import json
import secrets
from collections.abc import Mapping
from functools import partial
from typing import Any

from rollbook.contracts.decoding import is_too_deep
from rollbook.contracts.task import Observation
from rollbook.envs.sandboxes.warm import OpenSandbox
from rollbook.sandbox.bubblewrap import Kind, open_sandbox
from rollbook.sandbox.code import CODE_LIMITS, run_code_in

MAX_ERROR_CHARS = 600
RUNNER = """
import json, sys
function, mark, cases = json.load(sys.stdin)
module = {"__name__": "solution"}
exec(compile(open("solution.py").read(), "solution.py", "exec"), module)
results = []
for arguments in cases:
    try:
        results.append({"value": module[function](*arguments)})
    except Exception as error:
        results.append({"error": f"{type(error).__name__}: {error}"[:300]})
sys.stdout.write("\\n" + mark + json.dumps(results) + "\\n")
"""


class Code:
    """`max_turns`: modules that the agent may send. `run_s`: time for all tests of one of them."""

    warm_limits = CODE_LIMITS

    def __init__(self, *, max_turns: int = 4, run_s: float = 10.0, sandbox: Kind = "bubblewrap") -> None:
        if max_turns < 1:
            raise ValueError(f"max_turns is {max_turns}; a task needs at least one turn")
        self._max_turns = max_turns
        self._run_s = run_s
        self._sandbox = sandbox
        self.open_sandbox: OpenSandbox = partial(open_sandbox, limits=CODE_LIMITS, kind=sandbox)
        self._task: Mapping[str, Any] | None = None
        self._turns = 0

    async def reset(self, task: Mapping[str, Any]) -> Observation:
        missing = [name for name in ("goal", "function", "tests") if name not in task]
        if missing:
            raise ValueError(f"the task lacks {', '.join(missing)}; it needs goal, function and tests")
        self._task, self._turns = task, 0
        lines = [str(task["goal"])]
        lines += [f"Example: {_call(task, case)} returns {case['value']!r}" for case in task.get("examples", ())]
        if task.get("start"):
            lines.append(f"The module now:\n```python\n{task['start']}```")
        lines.append("Send the whole module in one block that starts with ```python and ends with ```.")
        return Observation(text="\n".join(lines))

    async def step(self, action: str) -> Observation:
        if self._task is None:
            raise RuntimeError("step without a task: reset first")
        task = self._task
        self._turns += 1
        module = module_of(action)
        if module is None:
            passed, feedback = 0, "There is no block with a module in your answer."
        else:
            passed, feedback = await self._score(task, module)
        solved = passed == len(task["tests"])
        done = solved or self._turns >= self._max_turns
        if done:
            self._task = None
        return Observation(
            text=feedback,
            reward=1.0 if solved else 0.0,
            done=done,
            solved=solved if done else None,
            facts={
                "passed": passed,
                "tests": len(task["tests"]),
                "module": module or "",
                "sandbox": self._sandbox,
            },
        )

    async def close(self) -> None:
        self._task = None

    async def _score(self, task: Mapping[str, Any], module: str) -> tuple[int, str]:
        """The number of passed tests, and what the agent is told."""
        # Code that prints the mark must know it: it is new in each run and arrives by standard input only.
        mark = secrets.token_hex(8)
        request = json.dumps([task["function"], mark, [case["args"] for case in task["tests"]]]).encode()
        async with self.open_sandbox() as sandbox:
            result = await run_code_in(
                sandbox, RUNNER, files={"solution.py": module}, stdin=request, timeout_s=self._run_s
            )
        results = results_of(result.stdout.decode(errors="replace"), mark)
        if result.is_timed_out:
            return 0, f"The tests took longer than {self._run_s:g} s."
        if len(results) != len(task["tests"]):
            return 0, f"The module failed:\n{result.text[-MAX_ERROR_CHARS:]}"
        pairs = list(zip(task["tests"], results, strict=True))
        passed = sum(_passes(case, outcome) for case, outcome in pairs)
        if passed == len(pairs):
            return passed, "All tests pass."
        lines = [f"{passed} of {len(pairs)} tests pass."]
        for case, outcome in pairs[: len(task.get("examples", ()))]:
            if not _passes(case, outcome):
                lines.append(f"{_call(task, case)} must return {case['value']!r}; yours: {_shown(outcome)}")
        return passed, "\n".join(lines)

    @staticmethod
    def oracle(task: Mapping[str, Any]) -> str:
        """The action that solves a task."""
        return f"```python\n{task['solution']}```"

    @staticmethod
    def example_tasks() -> list[dict[str, Any]]:
        """Tasks for the playground."""
        goal = "double(x) returns twice x."
        return [{"goal": goal, "function": "double", "tests": [{"args": [n], "value": 2 * n} for n in (1, 5, -3)]}]


def module_of(action: str) -> str | None:
    """The last fenced block of the agent's text; a block that was cut at the end of the answer counts."""
    blocks = action.split("```")
    if len(blocks) < 2:
        return None
    return blocks[-2 if len(blocks) % 2 else -1].partition("\n")[2]


def results_of(printed: str, mark: str) -> list[Any]:
    """What the runner printed after its mark."""
    _, found, rest = printed.rpartition(mark)
    if not found or is_too_deep(rest):
        return []
    try:
        results = json.loads(rest)
    except ValueError:
        return []
    return results if isinstance(results, list) else []


def _passes(case: Mapping[str, Any], outcome: Any) -> bool:
    """JSON values; 1 and True are different ones."""
    return (
        isinstance(outcome, dict) and "value" in outcome and json.dumps(outcome["value"]) == json.dumps(case["value"])
    )


def _call(task: Mapping[str, Any], case: Mapping[str, Any]) -> str:
    return f"{task['function']}({', '.join(repr(one) for one in case['args'])})"


def _shown(outcome: Any) -> str:
    text = outcome.get("error") or repr(outcome.get("value")) if isinstance(outcome, dict) else repr(outcome)
    return str(text)[:200]
