"""Files that survive power loss: contents first, then the name, then the directory that holds the name."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import xxhash
from safetensors import SafetensorError

from rollbook.contracts.errors import RunError

CHUNK_BYTES = 1 << 20


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """A full or read-only disk becomes one clear error. The libraries that write tensors each have an error of their own for it."""
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        raise RunError(
            f"{path} could not be written ({type(error).__name__}: {error}). Nothing half-written is left under that name;"
            " make room or permit writing, then start the run again: it resumes."
        ) from error


def sync_file(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_directory(path: Path) -> None:
    """A rename is durable once the directory that holds the name is."""
    sync_file(path)


def sync_tree(root: Path) -> None:
    """Every file and directory below `root`, and `root` itself."""
    for folder, _, names in os.walk(root, topdown=False):
        for name in names:
            sync_file(Path(folder) / name)
        sync_directory(Path(folder))


def write_text_atomically(path: Path, text: str) -> None:
    """The old text or the new one, never half of it."""
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
