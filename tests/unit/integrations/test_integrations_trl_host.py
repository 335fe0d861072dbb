"""`rollbook host` writes `host.json` as the TRL integration reads it."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from accelerate.data_loader import DataLoaderDispatcher
from rich.console import Console

from rollbook.commands.training.host import host, host_info
from rollbook.contracts.errors import RunError
from rollbook.integrations.trl import RollbookCallback
from rollbook.integrations.trl_run import HostInfo
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


@pytest.mark.parametrize(
    ("world_size", "loader", "message"),
    [
        (2, None, "TRL runs 2 training processes, and this integration supports one"),
        (1, DataLoaderDispatcher([1, 2]), "fetches a batch ahead of the one it trains; use `.*RollbookGRPOTrainer`"),
    ],
)
def test_a_trainer_that_would_train_other_batches_than_the_ledger_decided_is_refused(
    world_size: int, loader: Any, message: str
) -> None:
    run: Any = None  # not used before these checks
    with pytest.raises(RunError, match=message):
        RollbookCallback(run).on_train_begin(
            SimpleNamespace(world_size=world_size), None, None, train_dataloader=loader
        )
