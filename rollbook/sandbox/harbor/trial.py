"""One trial of a Harbor task: builds its image, opens its sandbox, and verifies what the agent left.

    async with open_trial(task) as trial:
        await trial.sandbox.exec("...")               # the agent
        verdict = await trial.verify()                # tests arrive only now
        verdict.reward

A verifier that fails, hangs or writes no reward raises `VerifierError`: the episode is unscorable and is played again, never 0.
"""

import asyncio
import hashlib
import io
import json
import math
import os
import tarfile
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from rollbook.contracts.errors import RunError
from rollbook.sandbox.bubblewrap import open_sandbox
from rollbook.sandbox.harbor.dockerfile import Copy, DockerfileError, Run
from rollbook.sandbox.harbor.task import HarborTask
from rollbook.sandbox.sandbox import Image, Sandbox, SandboxError, SandboxLimitError

LOGS = "/logs/verifier"
MAX_REWARD_BYTES = 1 << 20
SHOWN_CHARS = 2000
DEFAULT_CACHE = Path.home() / ".cache" / "rollbook" / "images"


class VerifierError(SandboxError):
    """The verifier gave no reward. The episode is not scored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskVerdict:
    reward: float
    rewards: Mapping[str, float]
    """All values that the verifier wrote."""
    output: str
    """The end of what it printed."""


@dataclass(frozen=True, slots=True)
class Trial:
    task: HarborTask
    sandbox: Sandbox

    async def solve(self) -> str:
        """Run the reference solution, as an agent would work. Returns what it printed."""
        solution = self.task.solution
        if solution is None:
            raise RunError(f"{self.task.directory} has no solution/solve.sh")
        await copy_tree(self.sandbox, solution.parent, "/solution")
        result = await self.sandbox.exec(
            ["bash", "/solution/solve.sh"], env=self.task.solution_env, timeout_s=self.task.agent_timeout_s
        )
        return result.text[-SHOWN_CHARS:]

    async def verify(self) -> TaskVerdict:
        """Copy the tests in, run them, and read the reward. Everything that the agent started is ended before."""
        try:
            await self.sandbox.end_processes()
            # An agent may have written a reward or tests of its own.
            await self.sandbox.exec(["rm", "-rf", "/tests", LOGS], cwd="/")
            await self.sandbox.exec(["mkdir", "-p", "/tests", LOGS], cwd="/")
            await copy_tree(self.sandbox, self.task.directory / "tests", "/tests")
            result = await self.sandbox.exec(
                ["bash", "/tests/test.sh"], env=self.task.verifier_env, timeout_s=self.task.verifier_timeout_s
            )
        except SandboxLimitError as error:
            raise VerifierError(f"{self.task.name}: the sandbox ended while the verifier ran: {error}") from error
        output = result.text[-SHOWN_CHARS:]
        if result.is_timed_out:
            raise VerifierError(
                f"{self.task.name}: the verifier took longer than {self.task.verifier_timeout_s:g} s: {output[-400:]}"
            )
        rewards = await self._rewards(output, result.exit_code)
        return TaskVerdict(reward=_main_reward(rewards), rewards=rewards, output=output)

    async def _rewards(self, output: str, exit_code: int) -> dict[str, float]:
        for name in ("reward.json", "reward.txt"):
            try:
                text = (await self.sandbox.read(f"{LOGS}/{name}", max_bytes=MAX_REWARD_BYTES)).decode()
                value = json.loads(text) if name.endswith("json") else float(text)
                rewards = value if isinstance(value, dict) else {"reward": value}
                numbers = {str(key): float(one) for key, one in rewards.items()}
                if numbers and all(map(math.isfinite, numbers.values())):
                    return numbers
                raise ValueError("it has no finite number")
            except FileNotFoundError:
                continue
            except (OSError, ValueError, TypeError) as error:
                raise VerifierError(f"{self.task.name}: {LOGS}/{name} cannot be read: {error}") from error
        raise VerifierError(
            f"{self.task.name}: the verifier ended with code {exit_code} and wrote neither reward.txt nor reward.json in {LOGS}: "
            f"{output[-400:]}"
        )


@asynccontextmanager
async def open_trial(
    task: HarborTask,
    *,
    images: Mapping[str, Path] | None = None,
    cache: Path = DEFAULT_CACHE,
    network: bool = False,
) -> AsyncIterator[Trial]:
    """`images`: local roots of base images; for others, `/usr` of this machine. `cache`: where built images are kept."""
    image = await build_image(task, images=images or {}, cache=cache)
    async with open_sandbox(image, task.limits, network=network) as sandbox:
        yield Trial(task, sandbox)


async def build_image(task: HarborTask, *, images: Mapping[str, Path], cache: Path) -> Image:
    """The image of the task's Dockerfile. Built once for each content; concurrent builds of the same give the same file."""
    recipe = task.recipe
    root = images.get(recipe.base)
    env = {**recipe.env, **task.env}
    context = task.directory / "environment"
    if not recipe.steps:
        return Image(root=root, env=env, workdir=recipe.workdir)
    layer = cache / f"{await asyncio.to_thread(_digest, task, root)}.tar"
    image = Image(root=root, layer=layer, env=env, workdir=recipe.workdir)
    if layer.exists():
        return image
    cache.mkdir(parents=True, exist_ok=True)
    limits = replace(
        task.limits, wall_s=task.build_timeout_s + 60.0, cpu_s=max(task.limits.cpu_s, task.build_timeout_s)
    )
    async with open_sandbox(Image(root=root, workdir="/"), limits) as sandbox:
        for step in recipe.steps:
            await _build_step(sandbox, step, context, task)
        await sandbox.end_processes()
        with tempfile.TemporaryDirectory(dir=cache) as partial:
            built = Path(partial, "layer.tar")
            await sandbox.snapshot(built)
            built.replace(layer)
    return image


async def _build_step(sandbox: Sandbox, step: Run | Copy, context: Path, task: HarborTask) -> None:
    where = f"{context / 'Dockerfile'}, line {step.line}"
    if isinstance(step, Run):
        result = await sandbox.exec(step.command, env=step.env, cwd=step.cwd, timeout_s=task.build_timeout_s)
        if not result.is_ok:
            raise DockerfileError(
                f"{where}: {' '.join(step.command)} failed in a sandbox (/usr is read-only, there is no network): "
                f"{result.text[-400:]}"
            )
        return
    for source in step.sources:
        for path in sorted(context.glob(source)) if any(c in source for c in "*?[") else [context / source]:
            if not path.resolve().is_relative_to(context.resolve()) or not path.exists():
                raise DockerfileError(f"{where}: {source} is not in {context}")
            if path.is_dir():
                await copy_tree(sandbox, path, step.target)
            else:
                target = step.target + path.name if step.target.endswith("/") else step.target
                await sandbox.write(target, path.read_bytes(), mode=path.stat().st_mode & 0o777)


async def copy_tree(sandbox: Sandbox, source: Path, target: str) -> None:
    """Copy the content of a directory of this machine into a directory of the sandbox."""
    result = await sandbox.exec(["mkdir", "-p", target], cwd="/")
    if result.is_ok:
        data = await asyncio.to_thread(_tar_of, source)
        result = await sandbox.exec(["tar", "-C", target, "--no-same-owner", "-xf", "-"], stdin=data, cwd="/")
    if not result.is_ok:
        raise SandboxError(f"{source} cannot be copied to {target}: {result.text[-400:]}")


def _tar_of(source: Path) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for path in sorted(source.rglob("*")):
            archive.add(path, arcname=path.relative_to(source).as_posix(), recursive=False)
    return buffer.getvalue()


def _digest(task: HarborTask, root: Path | None) -> str:
    """Of everything that the image depends on."""
    digest = hashlib.blake2b(repr((task.recipe, str(root), os.uname().machine)).encode(), digest_size=16)
    context = task.directory / "environment"
    for path in sorted(context.rglob("*")):
        digest.update(f"\0{path.relative_to(context)}\0{path.lstat().st_mode}\0".encode())
        if path.is_file():
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _main_reward(rewards: Mapping[str, float]) -> float:
    """The value named `reward`, or else the mean of all."""
    return rewards["reward"] if "reward" in rewards else sum(rewards.values()) / len(rewards)
