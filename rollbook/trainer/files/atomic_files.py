"""Atomic file writes that survive power loss: sync the contents, rename, then sync the directory."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import xxhash
from safetensors import SafetensorError

from rollbook.contracts.errors import RunError, machine_fault

CHUNK_BYTES = 1 << 20
FULL_BYTES = 1 << 20
"""A disk with less free space is full."""


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn write errors (disk full, read-only) into one `RunError`. Each library that writes tensors raises its own type."""
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        cause = machine_fault(error) or ("the disk is full" if _is_full(path) else f"{type(error).__name__}: {error}")
        raise RunError(
            f"{path} could not be written ({cause}). No partial file is left under that name."
            " Free disk space or fix permissions, then start the run again: it resumes."
        ) from error


def _is_full(path: Path) -> bool:
    """For errors of libraries that do not say so, such as `unexpected pos 64 vs 0` of torch."""
    parent = next(folder for folder in path.absolute().parents if folder.exists())
    return shutil.disk_usage(parent).free < FULL_BYTES


def sync_file(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_directory(path: Path) -> None:
    """Make renames in this directory durable."""
    sync_file(path)


def sync_tree(root: Path) -> None:
    """Sync every file and directory below `root`, and `root` itself."""
    for folder, _, names in os.walk(root, topdown=False):
        for name in names:
            sync_file(Path(folder) / name)
        sync_directory(Path(folder))


def write_text_atomically(path: Path, text: str) -> None:
    """Replace the file: readers see the old text or the new one."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            unfinished.write_text(text, encoding="utf-8")
            sync_file(unfinished)
            unfinished.replace(path)
            sync_directory(path.parent)
        finally:
            unfinished.unlink(missing_ok=True)


def file_digest(path: Path) -> str:
    whole = xxhash.xxh3_128()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            whole.update(chunk)
    return whole.hexdigest()
