"""The files that a sandbox sees of this machine, and the programs that its commands find."""

import os
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from rollbook.sandbox.sandbox import SYSTEM_PATH, Image

WHOLE = frozenset({"usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32"})
"""Directories of a root that are read-only as a whole. Of the others, each entry is: files can be created next to them."""
PRIVATE = frozenset({"proc", "dev", "sys", "tmp", "run", "mnt", "media", "boot", "lost+found"})
"""Directories of a root that are not shown."""
HOST_ETC = ("alternatives", "ld.so.cache", "ssl/certs", "mime.types", "os-release")
"""What programs of `/usr` read in `/etc`: links to their variants, the cache of libraries, root certificates."""
ETC = {
    "passwd": "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/:/usr/sbin/nologin\n",
    "group": "root:x:0:\nnogroup:x:65534:\n",
    "hosts": "127.0.0.1 localhost\n::1 localhost\n",
}


def mounts_of(image: Image) -> Iterator[tuple[str, Path]]:
    """Path in the sandbox, and its source on this machine."""
    if image.root is None:
        for name in sorted(WHOLE):
            if Path("/", name).exists():
                yield f"/{name}", Path("/", name)
        for name in HOST_ETC:
            if Path("/etc", name).exists():
                yield f"/etc/{name}", Path("/etc", name).resolve()
        for directory in _python_directories():
            yield str(directory), directory
    else:
        for entry in sorted(image.root.iterdir()):
            if entry.name in WHOLE:
                yield f"/{entry.name}", entry
            elif entry.is_dir() and entry.name not in PRIVATE:
                for child in sorted(entry.iterdir()):
                    yield f"/{entry.name}/{child.name}", child
    for path, source in image.binds.items():
        yield path, source.resolve()


@cache
def _python_directories() -> tuple[Path, ...]:
    """The programs and libraries of the Python that runs this process, unless they are in /usr."""
    prefix = Path(sys.base_prefix).resolve()
    if prefix.is_relative_to("/usr"):
        return ()
    return tuple(path for path in (prefix / "bin", prefix / "lib") if path.is_dir())


def python_of(image: Image) -> str:
    return "/usr/bin/python3" if image.root is not None else _own_python()


@cache
def _own_python() -> str:
    return os.path.realpath(sys.executable)


def environment_of(image: Image) -> dict[str, str]:
    """Of all commands."""
    return {"HOME": "/root", "LANG": "C.UTF-8", "USER": "root", **image.env, "PATH": search_path(image)}


def search_path(image: Image) -> str:
    path = image.env.get("PATH", SYSTEM_PATH)
    return path if image.root is not None else f"{Path(python_of(image)).parent}:{path}"
