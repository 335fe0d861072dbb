"""A directory with a predictable name is used only if it is ours alone."""

import os
import stat
from pathlib import Path

import pytest

from rollbook.access.private_files import make_private_directory
from rollbook.contracts.errors import RunError
from rollbook.inference.weights.shared_memory import LOCK_FILE
from rollbook.inference.weights.transport import TransportOptions
from rollbook.inference.weights.transports import files


def test_a_new_directory_is_private_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        make_private_directory(tmp_path / "new")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o700
    make_private_directory(tmp_path / "new")


@pytest.mark.parametrize("mode", [0o777, 0o750, 0o701, 0o1777])
def test_an_existing_directory_that_others_can_use_is_refused(tmp_path: Path, mode: int) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(mode)
    with pytest.raises(RunError, match="other users can use"):
        make_private_directory(tmp_path / "open")


def test_a_directory_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_private_directory(tmp_path / "theirs")
    mine = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: mine + 1)
    with pytest.raises(RunError, match=f"another user \\(uid {mine}\\)"):
        make_private_directory(tmp_path / "theirs")


def test_a_link_and_a_file_are_refused(tmp_path: Path) -> None:
    make_private_directory(tmp_path / "target")
    (tmp_path / "link").symlink_to(tmp_path / "target")
    (tmp_path / "file").touch()
    for name in ("link", "file"):
        with pytest.raises(RunError, match="not a directory"):
            make_private_directory(tmp_path / name)
    with pytest.raises(RunError, match="cannot be created"):
        make_private_directory(tmp_path / "missing" / "child")


async def test_weights_in_shared_memory_are_not_written_through_a_link_that_was_there_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "SHARED", tmp_path / "shm")
    (tmp_path / "shm").mkdir()
    options = TransportOptions(directory=str(tmp_path / "run" / "weights"))
    first = files.open_transport("shared_memory", options)
    (place,) = (tmp_path / "shm").iterdir()
    (place / "left").touch()
    second = files.open_transport("shared_memory", options)
    assert [path.name for path in place.iterdir()] == [LOCK_FILE]
    await first.close()
    await second.close()
    target = tmp_path / "target"
    make_private_directory(target)
    (target / "kept").touch()
    place.symlink_to(target)
    with pytest.raises(RunError, match="symbolic links are refused"):
        files.open_transport("shared_memory", options)
    assert [path.name for path in target.iterdir()] == ["kept"]
