"""The run directory: checked before a run starts, and locked by one `train` at a time."""

import os
import shutil
import stat
import tomllib
from collections import namedtuple
from pathlib import Path

import pytest
import tomli_w

from rollbook.run.config.source import read_source
from rollbook.run.directory import RunDirectory, RunDirectoryError
from rollbook.run.reader import audit


def test_a_run_is_not_mixed_with_the_files_of_its_project(tmp_path: Path) -> None:
    fault = RunDirectory(tmp_path).fault(source_dir=tmp_path)
    assert fault is not None
    assert "choose another, such as runs/first" in fault
    assert RunDirectory(tmp_path / "run").fault(source_dir=tmp_path) is None
    (tmp_path / "run.json").write_text("{}")
    assert RunDirectory(tmp_path).fault(source_dir=tmp_path) is None, "it is a run already"


def test_a_second_train_in_the_same_directory_is_rejected_with_the_pid(tmp_path: Path) -> None:
    first, second = RunDirectory(tmp_path), RunDirectory(tmp_path)
    with first.locked(), pytest.raises(RunDirectoryError, match=f"pid {os.getpid()}"), second.locked():
        pass
    with second.locked():
        pass


def test_an_unwritable_run_directory_gives_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a directory", encoding="utf-8")
    with pytest.raises(RunDirectoryError, match="choose another with --run-dir"):
        RunDirectory(tmp_path / "file" / "run").prepare()


def test_a_full_disk_is_reported_before_the_run_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(100, 99, 1 << 20))
    with pytest.raises(RunDirectoryError, match="only 1 MiB are free"):
        RunDirectory(tmp_path).prepare()


def test_settings_that_were_found_out_are_recorded_in_the_configuration(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    table: dict[str, dict[str, object]] = {"run": {"name": "a"}, "trainer": {"lr": 1e-3, "lora": {"rank": 4}}}
    directory.config_file.write_text(tomli_w.dumps(table), encoding="utf-8")
    directory.record_settings("trainer", {"max_tokens_per_microbatch": 300, "gradient_checkpointing": 2})
    table["trainer"] |= {"max_tokens_per_microbatch": 300, "gradient_checkpointing": 2}
    assert tomllib.loads(directory.config_file.read_text(encoding="utf-8")) == table
    assert [path.name for path in tmp_path.iterdir()] == ["config.toml"]


def test_a_directory_without_a_run_is_reported(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match="is not a run directory"):
        RunDirectory(tmp_path).read_manifest()
    with pytest.raises(RunDirectoryError, match="is not a run directory"):
        audit(tmp_path)
    with pytest.raises(RunDirectoryError, match="is not a run directory"):
        read_source(tmp_path)
    (tmp_path / "run.toml").touch()
    with pytest.raises(RunDirectoryError, match=r"can be read\. Is .*run\.toml meant\?"):
        read_source(tmp_path)
    (tmp_path / "big.toml").touch()
    with pytest.raises(RunDirectoryError, match=r"Its run files: big\.toml, run\.toml$"):
        read_source(tmp_path)
    with pytest.raises(RunDirectoryError, match=r"big\.toml is not a run directory: it is a file$"):
        audit(tmp_path / "big.toml")


def test_a_path_without_a_run_is_reported_with_the_runs_near_it(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match=r"runs/first does not exist$"):
        audit(tmp_path / "runs" / "first")
    for name in ("second", "third"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "run.json").touch()
    os.utime(tmp_path / "runs" / "second", (1, 1))
    near = rf"\. The newest runs in {tmp_path}/runs: third, second$"
    with pytest.raises(RunDirectoryError, match=rf"runs/first does not exist{near}"):
        audit(tmp_path / "runs" / "first")
    with pytest.raises(RunDirectoryError, match=rf"runs is not a run directory: .*{near}"):
        read_source(tmp_path / "runs")
    (tmp_path / "run.toml").touch()
    near = rf" The newest runs in {tmp_path}: runs/third, runs/second$"
    with pytest.raises(RunDirectoryError, match=rf"run\.toml is not a run directory: it is a file\.{near}"):
        audit(tmp_path / "run.toml")
    with pytest.raises(RunDirectoryError, match=rf"Is {tmp_path}/run\.toml meant\?{near}"):
        audit(tmp_path)


def test_a_new_run_is_readable_by_its_owner_only(tmp_path: Path) -> None:
    """Also in a directory that existed before. The owner may open it to others afterwards."""
    (tmp_path / "made").mkdir(mode=0o755)
    for directory in (RunDirectory(tmp_path / "made"), RunDirectory(tmp_path / "new" / "run")):
        directory.prepare()
        assert stat.S_IMODE(directory.path.stat().st_mode) == 0o700
        assert stat.S_IMODE(directory.token_file.stat().st_mode) == 0o600
        token = directory.token_file.read_text(encoding="ascii")
        directory.write_manifest(name="run", source_dir=tmp_path)
        directory.path.chmod(0o750)
        directory.prepare()
        assert stat.S_IMODE(directory.path.stat().st_mode) == 0o750
        assert directory.token_file.read_text(encoding="ascii") == token
