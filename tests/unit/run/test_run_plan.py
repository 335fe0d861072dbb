"""The processes of a run: names, addresses, and the GPUs that each of them sees."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from rollbook.run.config.run import ConfigError, RunConfig, load_config
from rollbook.run.directory import RunDirectory
from rollbook.run.supervision.plan import RunPlan, plan_run
from tests.parts.run.small import EXAMPLE


def config_of(*overrides: str) -> RunConfig:
    return load_config(EXAMPLE / "run.toml", overrides).config


def planned(tmp_path: Path, overrides: Sequence[str]) -> RunPlan:
    plan = plan_run(config_of(*overrides), RunDirectory(tmp_path))
    plan.close()
    return plan


GPUS = ["inference.replicas=2", "inference.device=cuda", "trainer.device=cuda", "trainer.ranks=2"]


def test_each_replica_and_the_trainer_see_only_their_own_gpus(tmp_path: Path) -> None:
    plan = planned(tmp_path, [*GPUS, "resources.policy_gpus=[3, 1]", "resources.trainer_gpus=[0, 2]"])
    seen = {start.name: start.environment.get("CUDA_VISIBLE_DEVICES") for start in plan.starts}
    assert seen == {"ledger": None, "policy": "3", "policy-1": "1", "trainer": "0,2", "rollout": None}


def test_without_resources_no_process_is_restricted(tmp_path: Path) -> None:
    assert not any("CUDA_VISIBLE_DEVICES" in start.environment for start in planned(tmp_path, GPUS).starts)


def test_a_vllm_replica_gets_several_gpus(tmp_path: Path) -> None:
    vllm = ["inference.engine=vllm", "inference.vllm.python=python", "inference.replicas=2"]
    plan = planned(tmp_path, [*vllm, "resources.policy_gpus=[0, 1, 2, 3]"])
    seen = [start.environment["CUDA_VISIBLE_DEVICES"] for start in plan.starts if start.role == "vllm"]
    assert seen == ["0,1", "2,3"]


@pytest.mark.parametrize(
    ("overrides", "cause"),
    [
        (["resources.trainer_gpus=[0]", "trainer.device=cpu"], "needs trainer.device = 'cuda'"),
        ([*GPUS, "resources.trainer_gpus=[0]"], "one GPU for each of the 2 trainer.ranks"),
        ([*GPUS, "resources.policy_gpus=[0, 1, 2]"], "cannot be divided evenly"),
        ([*GPUS, "resources.policy_gpus=[0, 1, 2, 3]"], "uses one GPU for each"),
        ([*GPUS, "inference.device=cuda:1", "resources.policy_gpus=[0, 1]"], "set it to 'cuda'"),
        ([*GPUS, "resources.policy_gpus=[1, 1]"], "must be different numbers"),
        ([*GPUS, "resources.policy_gpus=[0, 1]", "inference.transfer=cuda_ipc"], "separates them"),
    ],
)
def test_gpus_that_fit_no_replica_or_rank_are_refused(overrides: list[str], cause: str) -> None:
    with pytest.raises(ConfigError) as refused:
        config_of(*overrides)
    assert cause in str(refused.value)


def test_a_run_with_an_external_ledger_starts_no_ledger(tmp_path: Path) -> None:
    plan = planned(tmp_path, ["ledger.url=http://ledger.example:8000", "ledger.durability=power_loss"])
    assert "ledger" not in [start.name for start in plan.starts]
    assert plan.addresses["ledger"] == "http://ledger.example:8000"
    assert {start.addresses["ledger"] for start in plan.starts} == {"http://ledger.example:8000"}


def test_only_trainer_and_policy_servers_map_the_base_and_its_owner_sees_the_gpu_of_the_trainer(tmp_path: Path) -> None:
    gpus = ["resources.trainer_gpus=[1]", "resources.policy_gpus=[1]", "trainer.device=cuda", "inference.device=cuda"]
    more = ["evaluation.every_steps=40", "env.pool_size=400"]
    shared = ["trainer.lora.rank=4", "resources.shared_base=true"]
    starts = {start.name: start for start in planned(tmp_path, [*gpus, *more, *shared]).starts}
    file = RunDirectory(tmp_path).shared_base_file
    assert {name for name, start in starts.items() if start.shared_base is not None} == {"policy", "trainer"}
    assert all("--shared-base" in start.arguments() for name, start in starts.items() if start.shared_base == file)
    assert starts["base"].environment["CUDA_VISIBLE_DEVICES"] == "1"
    assert list(starts).index("base") < list(starts).index("policy"), "servers are stopped in reverse"
    assert "base" not in [start.name for start in planned(tmp_path, [*gpus, *more]).starts]
