"""`rollbook host` writes `host.json` as the TRL integration reads it."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from accelerate.data_loader import DataLoaderDispatcher
from rich.console import Console

from rollbook.commands.training.host import host, host_info
from rollbook.contracts.errors import RunError
from rollbook.integrations.trl import RollbookCallback, setting_problems
from rollbook.integrations.trl_run import HostInfo, open_host
from rollbook.run.config.run import load_config
from rollbook.run.directory import RunDirectory

EXAMPLE = Path(__file__).parents[3] / "examples" / "06_trl" / "run.toml"


def test_the_integration_reads_the_info_that_the_host_writes(tmp_path: Path) -> None:
    loaded, directory = load_config(EXAMPLE), RunDirectory(tmp_path)
    config = loaded.config
    directory.record_model(tmp_path / "model")
    written = host_info({"ledger": "http://a:1", "policy": "http://b:2,http://c:3"}, loaded, directory)
    info = msgspec.json.decode(json.dumps(written), type=HostInfo)
    assert info.policy_urls == ["http://b:2", "http://c:3"]
    assert info.rows_per_step == config.gate.groups_per_step * config.rollout.completions_per_prompt == 16
    assert info.ledger_token_file == info.token_file == str(directory.token_file)
    assert (info.max_head_offpolicy_versions, info.max_steps, info.run) == (2, 12, "trl")


def test_a_run_with_vllm_engines_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"inference\.engine is vllm, but an external trainer publishes weights"):
        host(
            EXAMPLE,
            run_dir=tmp_path / "run",
            overrides=[
                'inference.engine="vllm"',
                'inference.urls=["http://127.0.0.1:9"]',
                'inference.transfer="directory"',
            ],
            parent_fd=None,
            console=Console(),
        )
    assert not (tmp_path / "run").exists()


def test_a_trainer_that_would_train_other_batches_than_the_ledger_decided_is_refused() -> None:
    run: Any = None  # not used before this check
    message = "fetches a batch ahead of the one it trains; use `.*RollbookGRPOTrainer`"
    with pytest.raises(RunError, match=message):
        RollbookCallback(run).on_train_begin(
            SimpleNamespace(world_size=1), None, None, train_dataloader=DataLoaderDispatcher([1, 2])
        )


def test_the_rows_of_a_batch_are_divided_among_the_training_processes(tmp_path: Path) -> None:
    loaded, directory = load_config(EXAMPLE), RunDirectory(tmp_path)
    directory.record_model(tmp_path / "model")
    written = host_info({"ledger": "http://a:1", "policy": "http://b:2"}, loaded, directory)
    info = msgspec.json.decode(json.dumps(written), type=HostInfo)
    args = SimpleNamespace(
        per_device_train_batch_size=8,
        gradient_accumulation_steps=1,
        world_size=2,
        token_budget=0,
        weight_sync_steps=1,
        temperature=1.0,
        max_staleness=2,
        max_steps=12,
    )
    assert setting_problems(args, info) == []
    args.world_size = 4
    (problem,) = setting_problems(args, info)
    assert "× 4 processes is 32, a batch of the run has 16 rows" in problem


def test_a_process_of_another_rank_waits_for_the_host_of_rank_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It starts no host of its own; the file of a host that was killed does not count."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr("rollbook.integrations.trl_run.READY_S", 0.2)
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    loaded, directory = load_config(EXAMPLE), RunDirectory(tmp_path)
    directory.record_model(tmp_path / "model")
    written = host_info({"ledger": "http://a:1", "policy": "http://b:2"}, loaded, directory)
    (tmp_path / "host.json").write_text(json.dumps({**written, "pid": ended.pid}), encoding="utf-8")
    with pytest.raises(RunError, match="was not ready"), open_host(EXAMPLE, run_dir=tmp_path):
        pass
