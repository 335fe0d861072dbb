"""Runs one piece of model-written code in a sandbox of its own, for reward functions.

async def passes(case: RewardCase) -> float:
    result = await run_code(case.response, files={"test_it.py": case.row["tests"]}, command="python3 test_it.py")
    return float(result.is_ok)
"""

from collections.abc import Mapping, Sequence

from rollbook.sandbox.bubblewrap import Kind, open_sandbox
from rollbook.sandbox.sandbox import ExecResult, Limits, Sandbox, SandboxLimitError

CODE_LIMITS = Limits(memory_mb=512, cpu_s=60, processes=64, disk_mb=64, files=10_000, wall_s=120)


async def run_code(
    code: str,
    *,
    command: str | Sequence[str] = ("python3", "main.py"),
    files: Mapping[str, str | bytes] | None = None,
    stdin: bytes = b"",
    timeout_s: float = 10.0,
    limits: Limits = CODE_LIMITS,
    sandbox: Kind = "bubblewrap",
) -> ExecResult:
    """Write `code` to `main.py` and `files` next to it, and run the command there, without network and with limits.

    Code that fails, takes too long, exceeds a limit or kills itself is a result that is not `is_ok`. A failure of the machine
    raises, also if it kills the code only, so that a reward function that does not catch it leaves its sample unscored. Where no
    sandbox can run, it raises too: the code is not run.
    """
    async with open_sandbox(limits=limits, kind=sandbox) as opened:
        return await run_code_in(opened, code, command=command, files=files, stdin=stdin, timeout_s=timeout_s)


async def run_code_in(
    sandbox: Sandbox,
    code: str,
    *,
    command: str | Sequence[str] = ("python3", "main.py"),
    files: Mapping[str, str | bytes] | None = None,
    stdin: bytes = b"",
    timeout_s: float = 10.0,
) -> ExecResult:
    """Like `run_code`, in a sandbox that is open."""
    for path, content in {"main.py": code, **(files or {})}.items():
        # Half of a surrogate pair is a fault of the code, which Python reports.
        await sandbox.write(path, content.encode(errors="surrogatepass") if isinstance(content, str) else content)
    try:
        return await sandbox.exec(command, stdin=stdin, timeout_s=timeout_s, reports_kill=True)
    except SandboxLimitError as error:
        return ExecResult(exit_code=-9, stdout=b"", stderr=str(error).encode())
