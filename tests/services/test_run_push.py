"""`rollbook push` with the real client of the hub, against a local server that keeps what it receives."""

import base64
import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import yaml

from rollbook.commands.record.push import push
from rollbook.contracts.errors import RunError, UsageError
from rollbook.run.config.run import dump_toml, load_config
from rollbook.run.directory import RunDirectory
from tests.parts.run.small import REPOSITORY, rollbook


class LocalHub:
    """The routes that an upload uses."""

    def __init__(self) -> None:
        self.created: list[dict[str, Any]] = []
        self.commits: list[dict[str, Any]] = []
        self.files: dict[str, bytes] = {}
        self.card = ""
        self.refuses = False
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                status, reply = hub.reply(self.path.partition("?")[0], body)
                content = json.dumps(reply).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: Any) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        Thread(target=self._server.serve_forever, daemon=True).start()

    def reply(self, path: str, body: bytes) -> tuple[int, dict[str, Any]]:
        if self.refuses:
            return 403, {"error": "You need the role write"}
        if path == "/api/repos/create":
            self.created.append(json.loads(body))
            return 200, {"url": f"{self.url}/me/maths"}
        if path == "/api/validate-yaml":
            self.card = json.loads(body)["content"]
            return 200, {"errors": [], "warnings": []}
        if "/branch/" in path:
            return 200, {}
        if "/preupload/" in path:
            names = [file["path"] for file in json.loads(body)["files"]]
            return 200, {"files": [{"path": name, "uploadMode": "regular", "shouldIgnore": False} for name in names]}
        assert "/commit/" in path, path
        for line in map(json.loads, body.splitlines()):
            if line["key"] == "header":
                self.commits.append({"summary": line["value"]["summary"], "branch": path.rpartition("/")[2]})
            else:
                self.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
        return 200, {"commitUrl": f"{self.url}/me/maths/commit/abc", "commitOid": "abc", "success": True}

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def hub() -> Iterator[LocalHub]:
    hub = LocalHub()
    yield hub
    hub.close()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run directory with two checkpoints and metrics."""
    directory = RunDirectory(tmp_path / "run")
    loaded = load_config(REPOSITORY / "rollbook" / "demo" / "run.toml")
    directory.path.mkdir()
    directory.config_file.write_text(dump_toml(loaded.config), encoding="utf-8")
    directory.manifest_file.write_text(json.dumps({"source_dir": str(tmp_path), "search_path": []}), encoding="utf-8")
    directory.record_model(directory.path / "model")
    for step in (5, 10):
        model = directory.checkpoints / f"step-{step:06d}" / "model"
        model.mkdir(parents=True)
        (model / "config.json").write_text("{}")
        (model / "model.safetensors").write_bytes(bytes([step]) * 100)
        (model.parent / "checkpoint.json").write_text("{}")
        (model.parent / "trainer.pt").write_bytes(b"optimizer")
    rows = [{"process": "rollout", "step": step, "rollout/raw_reward": step / 10} for step in (5, 10)]
    directory.metrics_file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return directory.path


def test_the_newest_model_and_its_card_are_one_commit(run: Path, hub: LocalHub) -> None:
    done = push(run, "hf:me/maths", is_private=True, endpoint=hub.url)
    assert (done.step, sorted(done.files)) == (10, ["README.md", "config.json", "model.safetensors"])
    assert (hub.created[0]["organization"], hub.created[0]["name"]) == ("me", "maths")
    assert hub.commits == [{"summary": f"Step 10 of run {load_name(run)}", "branch": "main"}]
    assert hub.files["model.safetensors"] == bytes([10]) * 100
    # The state of the optimizer stays here.
    assert "trainer.pt" not in hub.files
    assert hub.files["README.md"].decode() == hub.card
    _, head, text = hub.files["README.md"].decode().split("---\n", 2)
    assert yaml.safe_load(head)["tags"] == ["rollbook", "reinforcement-learning"]
    assert "| rollout/raw_reward | 1 |" in text
    assert str(run) not in text


def load_name(run: Path) -> str:
    return str(next(line for line in (run / "config.toml").read_text().splitlines() if line.startswith("name"))[8:-1])


def test_the_command_line_pushes_an_earlier_step_to_a_branch(
    run: Path, hub: LocalHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    done = rollbook("push", str(run), "--to", "hf:me/maths", "--step", "5", "--revision", "early", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["step"] == 5
    assert hub.commits[0]["branch"] == "early"
    assert hub.files["model.safetensors"] == bytes([5]) * 100
    assert "| rollout/raw_reward | 0.5 |" in hub.files["README.md"].decode()


def test_mistakes_and_refusals_are_errors_that_say_what_to_do(run: Path, hub: LocalHub) -> None:
    with pytest.raises(UsageError, match="write the repository as hf:ORG/NAME"):
        push(run, "me/maths", endpoint=hub.url)
    with pytest.raises(UsageError, match="'not a name' is not a name of a repository"):
        push(run, "hf:not a name", endpoint=hub.url)
    with pytest.raises(RunError, match=r"no checkpoint of step 7; available steps: 0, 5, 10"):
        push(run, "hf:me/maths", step=7, endpoint=hub.url)
    hub.refuses = True
    with pytest.raises(RunError, match=r"was not uploaded: .*HF_TOKEN"):
        push(run, "hf:me/maths", endpoint=hub.url)
    assert hub.files == {}
