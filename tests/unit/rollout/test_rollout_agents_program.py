"""Programs of agents: their input, and the ends of what they print."""

import asyncio
import subprocess

import uvloop

from rollbook.rollout.agents.program import AgentLog, _exchange


def test_a_program_that_has_ended_before_its_input_is_sent_has_an_exit_code() -> None:
    """The loop of the workers refuses to write to it."""

    async def ended() -> tuple[int | None, tuple[bytes, bytes]]:
        process = await asyncio.create_subprocess_exec(
            "sh", "-c", "echo printed; exit 3", stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        await process.wait()
        assert process.stdin is not None
        while not process.stdin.is_closing():  # noqa: ASYNC110  # the loop notices it without an event
            await asyncio.sleep(0.001)
        exchanged = await _exchange(process, b"a task\n", AgentLog(), is_output_logged=False)
        return process.returncode, exchanged

    assert uvloop.run(ended()) == (3, (b"printed\n", b""))
