"""Builds the image of a task from its Dockerfile, in a sandbox, once for each content."""

import asyncio
import hashlib
import io
import os
import tarfile
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from rollbook.sandbox.bubblewrap import Kind, open_sandbox
from rollbook.sandbox.harbor.dockerfile import Copy, DockerfileError, Run
from rollbook.sandbox.harbor.task import HarborTask
from rollbook.sandbox.sandbox import Image, Sandbox, SandboxError

DEFAULT_CACHE = Path.home() / ".cache" / "rollbook" / "images"
HOST, ANY = "host", "*"
"""In `images`: programs of this machine, and all base images that are not named."""


def root_of(base: str, images: Mapping[str, str | Path]) -> Path | None:
    """The local root of a base image. None: `/usr` of this machine. Raises `DockerfileError` if nothing was said about it."""
    chosen = images.get(base) or images.get(ANY)
    if chosen is None:
        raise DockerfileError(
            f"FROM {base}: there is no local root for this base image. In env.args (environment harbor) or rollout.settings "
            f'(coding agent), set images = {{ "{base}" = "/path/of/a/root" }}, for example a root made by debootstrap, or '
            f'images = {{ "{base}" = "{HOST}" }} for the programs of this machine ("{ANY}" stands for all base images). For '
            f"`rollbook tasks check`: --image {base}={HOST}"
        )
    if str(chosen) == HOST:
        return None
    if not Path(chosen).is_dir():
        raise DockerfileError(f"FROM {base}: images names {chosen}, which is not a directory")
    return Path(chosen)


async def build_image(
    task: HarborTask, *, images: Mapping[str, str | Path], cache: Path, kind: Kind = "bubblewrap"
) -> Image:
    """Concurrent builds of the same content give the same file."""
    recipe = task.recipe
    root = root_of(recipe.base, images)
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
    async with open_sandbox(Image(root=root, workdir="/"), limits, kind=kind) as sandbox:
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
        if result.is_timed_out:
            limit = f"{task.build_timeout_s:g} s (environment.build_timeout_sec)"
            raise DockerfileError(f"{where}: {' '.join(step.command)} took longer than {limit}")
        if not result.is_ok:
            raise DockerfileError(
                f"{where}: {' '.join(step.command)} failed with exit code {result.exit_code} in a sandbox (/usr and the files of "
                f"the base image are read-only, there is no network): {result.text[-400:] or 'it printed nothing'}"
            )
        return
    for source in step.sources:
        found = sorted(context.glob(source)) if any(c in source for c in "*?[") else []
        for path in found or [context / source]:
            if not path.resolve().is_relative_to(context.resolve()) or not path.exists():
                raise DockerfileError(f"{where}: {source} is not in {context}")
            try:
                await _copy(sandbox, path, step.target)
            except (OSError, NotCopiedError) as error:
                raise DockerfileError(
                    f"{where}: {source} cannot be copied to {step.target} (/usr and the files of the base image "
                    f"are read-only): {error}"
                ) from error


async def _copy(sandbox: Sandbox, path: Path, target: str) -> None:
    if path.is_dir():
        await copy_tree(sandbox, path, target)
    elif target.endswith("/"):
        await sandbox.write(target + path.name, path.read_bytes(), mode=path.stat().st_mode & 0o777)
    else:
        try:
            await sandbox.write(target, path.read_bytes(), mode=path.stat().st_mode & 0o777)
        except IsADirectoryError:
            await _copy(sandbox, path, target + "/")


class NotCopiedError(SandboxError):
    """The files of a directory cannot be written in the sandbox."""


async def copy_tree(sandbox: Sandbox, source: Path, target: str) -> None:
    """Copy the content of a directory of this machine into a directory of the sandbox."""
    result = await sandbox.exec(["mkdir", "-p", target], cwd="/")
    if result.is_ok:
        data = await asyncio.to_thread(tar_of, source)
        result = await sandbox.exec(["tar", "-C", target, "--no-same-owner", "-xf", "-"], stdin=data, cwd="/")
    if not result.is_ok:
        error_class = SandboxError if result.is_timed_out else NotCopiedError
        raise error_class(f"{source} cannot be copied to {target}: {result.text[-400:]}")


def tar_of(source: Path) -> bytes:
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
