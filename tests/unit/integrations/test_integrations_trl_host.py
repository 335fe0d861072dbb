"""What `rollbook host` tells, and what a trainer of other people reads of it: two sides that must not drift apart."""

import json
from pathlib import Path

import msgspec

from rollbook.integrations.trl_run import HostFacts
from rollbook.run.commands.host import host_facts
from rollbook.run.config.run import load_config
from rollbook.run.directory import RunDirectory
from rollbook.run.model_location import record_model_location

EXAMPLE = Path(__file__).parents[3] / "examples" / "06_trl" / "run.toml"


def test_a_trainer_reads_what_the_host_tells(tmp_path: Path) -> None:
    config, directory = load_config(EXAMPLE).config, RunDirectory(tmp_path)
    record_model_location(directory, tmp_path / "model")
    told = host_facts({"ledger": "http://a:1", "policy": "http://b:2,http://c:3"}, config, directory)
    facts = msgspec.json.decode(json.dumps(told), type=HostFacts)
    assert facts.policy_urls == ["http://b:2", "http://c:3"]
    assert facts.rows_per_step == config.gate.groups_per_step * config.rollout.completions_per_prompt == 16
    assert (facts.max_head_offpolicy_versions, facts.max_steps, facts.run) == (2, 12, "trl")
