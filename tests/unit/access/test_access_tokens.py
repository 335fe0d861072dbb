"""Token files: created once, private, and refused when others can read them."""

import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rollbook.access.tokens import Secret, TokenFileError, bearer_token, read_or_create_token, read_token


def test_a_missing_token_file_is_created_for_its_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "state" / "token"
    token = read_or_create_token(path)
    assert len(token) >= 40
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert read_or_create_token(path) == token
    assert list(path.parent.iterdir()) == [path]


def test_several_creators_agree_on_one_token(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        found = set(pool.map(lambda _: read_or_create_token(tmp_path / "token"), range(32)))
    assert len(found) == 1


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o620])
def test_a_file_that_others_can_read_or_write_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "token"
    read_or_create_token(path)
    path.chmod(mode)
    with pytest.raises(TokenFileError, match=f"chmod 600 {path}"):
        read_token(path)


@pytest.mark.parametrize("content", [b"", b"short", b"with a blank in the middle", b"\xff" * 20, b"a" * 20 + b"\x07"])
def test_a_file_without_a_usable_token_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "token"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(TokenFileError, match="at least 16"):
        read_token(path)


def test_a_directory_and_a_missing_file_are_reported(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(TokenFileError, match="cannot be read"):
            read_token(path)


def test_a_secret_does_not_show_its_token() -> None:
    secret = Secret("a-token-of-someone")
    assert "a-token" not in repr(vars(secret))
    assert secret.matches("a-token-of-someone")
    assert not any(map(secret.matches, ("", "a-token-of-someon", "a-token-of-someone ", "\udcff")))


def test_only_the_bearer_scheme_carries_a_token() -> None:
    assert bearer_token("Bearer abc") == bearer_token("bearer  abc ") == "abc"
    assert bearer_token("Basic abc") == bearer_token("Bearer") == bearer_token("") == bearer_token(None) == ""
