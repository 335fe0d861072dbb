"""One trial of a Harbor task: builds its image, opens its sandbox, and verifies what the agent left.

    async with open_trial(task) as trial:
        await trial.sandbox.exec("...")               # the agent
        verdict = await trial.verify()                # tests arrive only now
        verdict.reward

A verifier that fails, hangs or writes no reward raises `VerifierError`: the episode is unscorable and is played again, never 0.
"""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from rollbook.contracts.errors import RunError
from rollbook.sandbox.bubblewrap import Kind, open_sandbox
from rollbook.sandbox.harbor.image import DEFAULT_CACHE, build_image, copy_tree
from rollbook.sandbox.harbor.task import HarborTask, HarborTaskError
from rollbook.sandbox.harbor.verifier import TaskVerdict, verify
from rollbook.sandbox.sandbox import REMOTE, ExecResult, Image, Limits, Sandbox, SandboxError, SandboxState


@dataclass(frozen=True, slots=True)
class Trial:
    task: HarborTask
    sandbox: Sandbox
    image: Image
    before: SandboxState
    """The sandbox as the agent finds it."""

    async def solve(self) -> ExecResult:
        """Run the reference solution, as an agent would work."""
        solution = self.task.solution
        if solution is None:
            raise RunError(f"{self.task.directory} has no solution/solve.sh")
        await copy_tree(self.sandbox, solution.parent, "/solution")
        return await self.sandbox.exec(
            ["bash", "/solution/solve.sh"], env=self.task.solution_env, timeout_s=self.task.agent_timeout_s
        )

    async def verify(self) -> TaskVerdict:
        """Copy the tests in, run them, and read the reward. Everything that the agent started is ended before."""
        return await verify(self.task, self.sandbox, self.image, self.before)


@asynccontextmanager
async def open_trial(
    task: HarborTask,
    *,
    images: Mapping[str, str | Path] | None = None,
    cache: Path = DEFAULT_CACHE,
    network: bool = False,
    kind: Kind = "bubblewrap",
    binds: Mapping[str, Path] | None = None,
    limits: Limits | None = None,
) -> AsyncIterator[Trial]:
    """`images`: local roots of base images, or `host`: `/usr` of this machine. `cache`: where built images are kept. `binds`: files
    of this machine that an agent needs. `limits`: instead of those of the task."""
    if kind in ("none", *REMOTE):
        raise HarborTaskError(
            f'sandbox = "{kind}" cannot start the image of a Harbor task; use "bubblewrap", "podman" or "docker"'
        )
    image = await build_image(task, images=images or {}, cache=cache, kind=kind)
    image = replace(image, binds={**image.binds, **(binds or {})})
    async with open_sandbox(image, limits or task.limits, kind=kind, network=network) as sandbox:
        before = await sandbox.inspect()
        if before.moved:
            raise SandboxError(f"{', '.join(before.moved)} of this machine changed while the sandbox started")
        yield Trial(task, sandbox, image, before)
