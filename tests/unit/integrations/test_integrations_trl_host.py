"""`rollbook host` writes `host.json` as the TRL integration reads it."""

import json
from pathlib import Path

import msgspec

from rollbook.integrations.trl_run import HostInfo
from rollbook.run.commands.host import host_info
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
