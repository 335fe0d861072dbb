"""The environments `code` and `files`: real code and a real shell in a sandbox."""

import asyncio
import io
import os
from dataclasses import replace
from typing import Any

import psutil
import pytest

from rollbook.commands.checks.tasks import check_tasks
from rollbook.concurrency.deadline import Deadline
from rollbook.contracts.errors import RunError
from rollbook.envs.builtin.code import Code
from rollbook.envs.builtin.code_tasks import tasks as code_tasks
from rollbook.envs.builtin.shell import NAMES, Files, file_tasks
from rollbook.envs.catalog import open_environment_pool
from rollbook.envs.config import EnvConfig
from rollbook.sandbox.code import run_code
from rollbook.sandbox.sandbox import Limits, SandboxDiedError, SandboxUnavailableError
from rollbook.telemetry.events import EventLog
from tests.parts.sandbox.bubblewrap import FORK_BOMB, require_bubblewrap


@pytest.fixture(scope="module", autouse=True)
def _bubblewrap() -> None:
    require_bubblewrap()


def module(code: str) -> str:
    return f"Here it is:\n```python\n{code}\n```"


def task_of(name: str) -> dict[str, Any]:
    return next(task for task in code_tasks() if task["id"] == name)


def test_there_are_more_than_two_hundred_code_tasks_in_five_tiers() -> None:
    tasks = list(code_tasks())
    assert len({task["id"] for task in tasks}) == len(tasks) == 240
    assert {task["tier"] for task in tasks} == {1, 2, 3, 4, 5}
    assert tasks == list(code_tasks())
    assert len({task["id"] for task in file_tasks()}) == 60
    assert {task["tier"] for task in file_tasks()} == {1, 2, 3, 4, 5}


def test_no_solution_knows_a_name_that_its_goal_does_not_say() -> None:
    """Who learns from such a solution learns to invent names."""
    for task in file_tasks(count=200):
        unknown = [name for name in NAMES if name in " ".join(task["solution"]) and name not in task["goal"]]
        assert not unknown, task


async def test_a_module_is_repaired_over_several_turns() -> None:
    task = task_of("code-shorten-4-repair")
    environment = Code()
    shown = (await environment.reset(task)).text
    assert task["start"] in shown
    first = await environment.step(module(task["start"]))
    assert not first.done
    assert "tests pass" in first.text
    assert (await environment.step("I give no code")).text == "There is no block with a module in your answer."
    broken = await environment.step(module("def shorten(text:"))
    assert "SyntaxError" in broken.text
    last = await environment.step(Code.oracle(task))
    assert (last.done, last.solved, last.reward) == (True, True, 1.0)


@pytest.mark.parametrize(
    "code",
    [
        "import sys; sys.exit(0)",
        "import os; os._exit(0)",
        "print('All tests pass.')",
        pytest.param("while True: pass", marks=pytest.mark.slow),
        "x = bytearray(10**10)",
        FORK_BOMB,
        "class E:\n    def __eq__(self, other): return True\ndef scaled_sum(numbers): return E()",
        "import sys, json\nf = sys._getframe(1).f_globals\ndef scaled_sum(n): return f.get('cases')",
        pytest.param(
            "def scaled_sum(n):\n    import sys\n    sys.setrecursionlimit(10**9)\n    return scaled_sum(n)",
            marks=pytest.mark.slow,
        ),
    ],
)
async def test_code_that_cheats_or_destroys_gets_nothing(code: str) -> None:
    environment = Code(max_turns=1, run_s=1.5)
    await environment.reset(task_of("code-scaled_sum-3-write"))
    result = await environment.step(module(code))
    assert (result.done, result.reward) == (True, 0.0)
    assert (await environment.reset(task_of("code-scaled_sum-3-write"))).text


async def test_files_of_a_real_file_system_are_changed_and_graded() -> None:
    task = next(task for task in file_tasks() if "tidy" in task["id"])
    environment = Files()
    await environment.reset(task)
    assert "inbox" in (await environment.step("```sh\nls\n```")).text
    assert "exit code 1" in (await environment.step("cat /etc/shadow")).text
    for command in Files.oracle(task):
        last = await environment.step(command)
    assert (last.done, last.reward) == (True, 1.0)
    assert last.facts["sandbox"]["kind"] == "bubblewrap"
    with pytest.raises(ValueError, match="solved at the start"):
        await environment.reset({**task, "expect": {}})
    await environment.close()


async def test_commands_that_exceed_a_limit_end_the_episode_with_no_reward() -> None:
    environment = Files()
    await environment.reset(next(iter(file_tasks())))
    last = await environment.step("while :; do sleep 30 & done")
    assert (last.done, last.reward) == (True, 0.0)
    assert "processes" in last.text


async def test_the_time_of_the_policy_and_of_a_waiting_sandbox_ends_no_episode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Files, "warm_limits", replace(Files.warm_limits, wall_s=1.0))
    log = EventLog("test", echo=io.StringIO())
    async with open_environment_pool(EnvConfig(name="files"), size=1, log=log) as pool:
        await asyncio.sleep(1.1)
        env = await pool.acquire(Deadline(30.0, "test"))
        await env.reset(FILES_TASK)
        assert not (await env.step("sleep 100 & sleep 0.2")).done
        await asyncio.sleep(0.5)
        assert (await env.step("sleep 0.2; echo x > a.txt")).reward == 1.0
        await env.close()


@pytest.mark.parametrize("text", ["\0", "\ud800"])
async def test_a_command_that_no_shell_can_run_is_a_failure_of_the_policy(text: str) -> None:
    environment = Files()
    await environment.reset(FILES_TASK)
    assert "exit code 126" in (await environment.step(f"echo {text}")).text
    assert (await environment.step("echo x > a.txt")).reward == 1.0


async def test_a_sandbox_that_dies_is_not_scored() -> None:
    environment = Files()
    await environment.reset(next(iter(file_tasks())))
    step = asyncio.create_task(environment.step("sleep 30"))
    await asyncio.sleep(0)
    os.kill(environment._sandbox._process.pid, 9)  # type: ignore[union-attr]
    with pytest.raises(SandboxDiedError):
        await step
    await environment.close()


async def test_generated_tasks_give_1_to_their_solution_and_0_to_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    code = [task for task in code_tasks(constants=(3,)) if task["kind"] == "repair"][::4]
    some = {"code": lambda: code, "files": lambda: list(file_tasks(count=10))}
    monkeypatch.setattr("rollbook.commands.checks.tasks.GENERATED", some)
    for source, count in (("files", 10), ("code", 5)):
        checks = await check_tasks(source, is_oracle=True)
        assert [(check.fault, check.solved, check.empty) for check in checks] == [(None, 1.0, 0.0)] * count


@pytest.mark.slow
async def test_all_generated_tasks_give_1_to_their_solution_and_0_to_nothing() -> None:
    checks = [*await check_tasks("code", is_oracle=True), *await check_tasks("files", is_oracle=True)]
    assert len(checks) == 300
    assert {(check.fault, check.solved, check.empty) for check in checks} == {(None, 1.0, 0.0)}


async def test_a_reward_function_runs_code_and_gets_a_result_for_every_failure_of_the_code() -> None:
    assert (await run_code("print(input())", stdin=b"42")).stdout == b"42\n"
    assert (await run_code("import helper", files={"helper.py": "print('helped')"})).stdout == b"helped\n"
    assert (await run_code("raise SystemExit(4)")).exit_code == 4
    assert (await run_code("while True: pass", timeout_s=0.5)).is_timed_out
    small = Limits(processes=5)
    ended = await run_code(FORK_BOMB, limits=small)
    assert (ended.is_ok, ended.exit_code) == (False, -9)
    assert b"processes" in ended.stderr


async def test_code_is_not_run_where_no_sandbox_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(SandboxUnavailableError, match="bubblewrap is not installed"):
        await run_code("print(1)")


FILES_TASK = {"goal": "Write x into a.txt.", "expect": {"a.txt": "x\n"}}


def guests() -> set[int]:
    """The sandboxes of this process."""
    children = psutil.Process().children()
    return {process.pid for process in children if process.name() == "bwrap"}


async def test_a_pool_of_files_has_its_sandboxes_started_before_an_episode_and_uses_each_once() -> None:
    log, before = EventLog("test", echo=io.StringIO()), guests()
    async with open_environment_pool(EnvConfig(name="files"), size=2, log=log) as pool:
        ready = guests() - before
        assert len(ready) == 3  # and a spare one
        for _ in range(4):
            env = await pool.acquire(Deadline(30.0, "test"))
            await env.reset(FILES_TASK)
            seen = await env.step("ls; touch left-over")
            assert seen.text == "(no output)"
            assert (await env.step("echo x > a.txt")).reward == 1.0
            await env.close()
        assert pool.health().busy == 0
    assert guests() == before


async def test_a_sandbox_of_a_pool_that_is_killed_while_it_waits_reaches_no_episode() -> None:
    log = EventLog("test", echo=io.StringIO())
    async with open_environment_pool(EnvConfig(name="code"), size=1, log=log) as pool:
        for pid in guests():
            for process in [*psutil.Process(pid).children(recursive=True), psutil.Process(pid)]:
                process.kill()
        env = await pool.acquire(Deadline(30.0, "test"))
        task = next(iter(code_tasks()))
        await env.reset(task)
        assert (await env.step(Code.oracle(task))).reward == 1.0
        await env.close()


async def test_a_pool_of_sandboxes_that_cannot_start_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(RunError, match=r"the sandbox pool does not start: bubblewrap is not installed"):
        async with open_environment_pool(EnvConfig(name="files"), size=1, log=EventLog("test", echo=io.StringIO())):
            pass
