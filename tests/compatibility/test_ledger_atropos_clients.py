"""`make test-atropos`: atroposlib environments and trainer against our server, which is killed twice."""

import json
import os
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollbook.contracts.admission import RunId
from rollbook.ledger.stores.sqlite.store import open_readonly
from rollbook.ledger.tools.audit import audit
from tests.parts.ledger.run_api import ROOT, RunApi, running_api

PYTHON = Path(os.environ.get("ATROPOS_PYTHON", ROOT / ".venvs" / "atropos" / "bin" / "python"))
CLIENTS = Path(__file__).with_name("atropos_clients.py")
BATCH_SIZE, STEPS, KILL_AFTER = 8, 24, (6, 14)
TIMEOUT_S = 180.0
MAKE_TOKENIZER = """
import sys
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
words = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
PreTrainedTokenizerFast(tokenizer_object=words, unk_token="a").save_pretrained(sys.argv[1])
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(not PYTHON.exists(), reason="needs atroposlib in its own environment: make test-atropos"),
]


@pytest.fixture
def api(tmp_path: Path) -> Iterator[RunApi]:
    with running_api(f"sqlite:///{tmp_path / 'store'}") as api:
        yield api


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def test_every_acknowledged_group_is_delivered_once_although_the_server_is_killed(api: RunApi, tmp_path: Path) -> None:
    delivered, tokenizer = tmp_path / "delivered", tmp_path / "tokenizer"
    acknowledged = {name: tmp_path / f"acknowledged-{name}" for name in ("adds", "multiplies")}
    subprocess.run([PYTHON, "-c", MAKE_TOKENIZER, tokenizer], check=True, cwd=tmp_path)
    trainer = subprocess.Popen([PYTHON, CLIENTS, "trainer", api.url, delivered, str(BATCH_SIZE), str(STEPS)])
    envs = [
        subprocess.Popen([PYTHON, CLIENTS, "env", name, str(size), api.url, acknowledged[name], tokenizer])
        for (name, size) in (("adds", 4), ("multiplies", 2))
    ]
    try:
        for step in KILL_AFTER:
            wait_for(lambda step=step: len(lines(delivered)) >= step, trainer)
            time.sleep(0.1)  # while the trainer trains and the environments post
            api.kill_server()
        assert trainer.wait(TIMEOUT_S) == 0
    finally:
        for process in (*envs, trainer):
            process.terminate()
            process.wait(30)
    api.stop()

    had = Counter(group for line in lines(delivered) for group in json.loads(line))
    promised = {group for path in acknowledged.values() for group in lines(path)}
    waiting = queued_groups(tmp_path / "store")
    assert len(lines(delivered)) == STEPS
    assert set(had.values()) == {1}, "a group was delivered twice"
    assert promised <= set(had) | waiting, "an acknowledged group was lost"
    assert not set(had) & waiting
    assert {group.partition("/")[0] for group in had} == {str(sum(name.encode())) for name in acknowledged}


def wait_for(is_true: object, process: subprocess.Popen[bytes]) -> None:
    assert callable(is_true)
    until = time.monotonic() + TIMEOUT_S
    while not is_true():
        assert process.poll() is None, "the trainer ended"
        assert time.monotonic() < until, "nothing moved"
        time.sleep(0.02)


def queued_groups(directory: Path) -> set[str]:
    with open_readonly(directory) as file:
        assert audit(file, RunId("atropos")).violations == ()
        payloads = file.read_now(
            lambda tx: [
                tx.payloads.get(RunId("atropos"), g.group_id) or b"" for g in tx.groups.queued(RunId("atropos"))
            ]
        )
    names = (json.loads(payload)["tokens"][0] for payload in payloads)
    return {f"{first}/{second}" for first, second, *_ in names}
