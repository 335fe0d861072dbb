"""Tasks of a dataset on the Hugging Face Hub, with the real library: a directory, and a local server with two revisions."""

import json
import re
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest
from pydantic import ValidationError

from rollbook.contracts.errors import RunError
from rollbook.tasks.config import HubConfig, TasksConfig
from rollbook.tasks.dataset import load_tasks

ROWS = [{"problem": f"{n} + {n}?", "solution": str(2 * n), "level": n} for n in range(5)]
COMMITS = {"v1": "1" * 40, "main": "2" * 40}
"""The commits of the dataset `me/maths`, by their names. Each has one file with one row, which names the commit."""


class DatasetServer(BaseHTTPRequestHandler):
    """The routes of the hub that reading a dataset uses."""

    def do_GET(self) -> None:
        status, content, headers = self._reply(self.path.partition("?")[0])
        self.send_response(status)
        for name, value in (*headers.items(), ("Content-Length", str(len(content)))):
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    do_HEAD = do_GET

    def _reply(self, path: str) -> tuple[int, bytes, dict[str, str]]:
        found = re.fullmatch(r"(?:/api)?/datasets/me/maths(?:/(revision|tree|resolve)/(\w+))?(?:/(.+))?", path)
        route, revision, name = found.groups() if found else ("", None, None)
        commit = COMMITS.get(revision or "main", revision)
        row = json.dumps({"commit": commit}).encode() + b"\n"
        if route == "resolve" and name == "train.jsonl":
            return 200, row, {"ETag": f'"{commit}"', "X-Repo-Commit": str(commit)}
        if name is not None or route not in (None, "revision", "tree"):
            return 404, b"{}", {"X-Error-Code": "EntryNotFound"}
        file = {"type": "file", "path": "train.jsonl", "size": len(row), "oid": "0" * 40}
        described = {"id": "me/maths", "sha": commit, "siblings": [{"rfilename": "train.jsonl"}]}
        return 200, json.dumps([file] if route == "tree" else described).encode(), {}

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    server = ThreadingHTTPServer(("127.0.0.1", 0), DatasetServer)
    Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr("datasets.config.HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    yield
    server.shutdown()
    server.server_close()


@pytest.mark.usefixtures("hub")
@pytest.mark.parametrize("is_streaming", [False, True])
@pytest.mark.parametrize(("revision", "commit"), [("v1", COMMITS["v1"]), (None, COMMITS["main"])])
def test_a_dataset_of_the_hub_is_read_at_its_revision(
    tmp_path: Path, revision: str | None, commit: str, is_streaming: bool
) -> None:
    settings = HubConfig(revision=revision, streaming=is_streaming)
    config = TasksConfig(source="hf:me/maths", split="train", columns={"answer": "commit"}, hub=settings)
    assert [task.row for task in load_tasks(config, base_dir=tmp_path)] == [{"answer": commit}]


def dataset_directory(path: Path) -> None:
    """A dataset as on the hub: one folder for each subset, one file for each split."""
    for subset, count in (("main", 5), ("small", 1)):
        (path / subset).mkdir(parents=True)
        for split in ("train", "test"):
            rows = [{**row, "split_is": split} for row in ROWS[:count]]
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path / subset / f"{split}.parquet")
    (path / "README.md").write_text(
        "---\nconfigs:\n"
        + "".join(
            f"- config_name: {subset}\n  data_files:\n"
            + "".join(f"  - split: {split}\n    path: {subset}/{split}.parquet\n" for split in ("train", "test"))
            for subset in ("main", "small")
        )
        + "---\n"
    )


@pytest.mark.parametrize("is_streaming", [False, True])
def test_a_dataset_directory_is_read_by_subset_and_split(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_streaming: bool
) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    dataset_directory(tmp_path / "maths")
    hub = HubConfig(subset="main", streaming=is_streaming)
    tasks = load_tasks(TasksConfig(source="hf:maths", split="test", hub=hub, limit=3), base_dir=tmp_path)
    assert [task.row for task in tasks] == [{**row, "split_is": "test"} for row in ROWS[:3]]
    small = TasksConfig(source="hf:maths", hub=HubConfig(subset="small", streaming=is_streaming))
    assert [task.row["split_is"] for task in load_tasks(small, base_dir=tmp_path)] == ["train"]
    with pytest.raises(RunError, match=r"hf:maths .split validation. cannot be read"):
        load_tasks(TasksConfig(source="hf:maths", split="validation", hub=hub), base_dir=tmp_path)


def test_a_dataset_saved_to_disk_is_read_by_split(tmp_path: Path) -> None:
    parts = {"train": datasets.Dataset.from_list(ROWS), "test": datasets.Dataset.from_list(ROWS[:2])}
    datasets.DatasetDict(parts).save_to_disk(str(tmp_path / "saved"))
    tasks = load_tasks(TasksConfig(source="hf:saved", split="test"), base_dir=tmp_path)
    assert [task.row for task in tasks] == ROWS[:2]


def test_hub_settings_need_a_dataset_as_the_source() -> None:
    with pytest.raises(ValidationError, match="hub is read only with source"):
        TasksConfig(source="t.jsonl", hub=HubConfig(subset="main"))
