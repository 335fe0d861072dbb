"""Files that survive power loss: contents first, then the name, then the directory that holds the name."""

import hashlib
import os
from pathlib import Path

CHUNK_BYTES = 1 << 20


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
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        unfinished.write_text(text, encoding="utf-8")
        sync_file(unfinished)
        unfinished.replace(path)
        sync_directory(path.parent)
    finally:
        unfinished.unlink(missing_ok=True)


def file_digest(path: Path) -> str:
    whole = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            whole.update(chunk)
    return whole.hexdigest()
