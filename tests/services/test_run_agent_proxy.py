"""A whole run whose agent is an openai client in the rollout worker."""

import re
from pathlib import Path

import pytest

from rollbook.contracts.group import GroupId, GroupState
from rollbook.run.reader import open_run
from tests.parts.run.small import SmallRun, rollbook

EXAMPLE = Path(__file__).parents[2] / "examples" / "07_agent_proxy"
STEPS = 3


@pytest.mark.slow
def test_an_unchanged_agent_is_trained_and_every_token_has_an_author(tmp_path: Path) -> None:
    (tmp_path / "shouting_agent.py").write_text((EXAMPLE / "shouting_agent.py").read_text(encoding="utf-8"))
    overrides = [f"trainer.max_steps={STEPS}", "rollout.drop_constant_reward=false"]
    run = SmallRun(tmp_path, overrides, config=(EXAMPLE / "run.toml").read_text(encoding="utf-8"))
    summary = run.start().wait()
    assert summary["exit_code"] == 0, summary["stderr"]
    with open_run(run.directory) as record:
        durable = [group.group_id for group in record.groups(state=GroupState.DURABLE, limit=100)]
        group = record.samples(GroupId(durable[0]))
    assert len(durable) == STEPS * 2
    assert group is not None
    for sample in group.samples:
        assert len(sample.turns) == 2
        assert len(sample.sequences) == 1, "the second turn continued the exact tokens of the first"
        assert sample.sequences[0].has_logprobs
        assert sample.messages is not None
        assert [m["role"] for m in sample.messages] == ["user", "assistant", "user", "assistant"]
    shown = rollbook("inspect", str(run.directory), str(durable[0])).stdout
    for author in ("template", "user", "policy"):
        assert re.search(rf"^ +\d+ +\d+ .* {author}\b", shown, re.MULTILINE), shown
