"""The weight transport that `transfer = "auto"` chooses."""

import pytest

from rollbook.inference.config import InferenceConfig
from rollbook.run.policy_clients import chosen_transfer


@pytest.mark.parametrize("device", ["cuda", "cuda:0"])
def test_weights_stay_on_the_gpu_that_trainer_and_engine_share(device: str) -> None:
    config = InferenceConfig(engine="transformers", device=device)
    assert chosen_transfer(config, "cuda") == "cuda_ipc"


@pytest.mark.parametrize(
    ("config", "trainer_device"),
    [
        (InferenceConfig(engine="transformers", device="cuda:1"), "cuda"),
        (InferenceConfig(engine="transformers", device="cuda"), "cpu"),
        (InferenceConfig(engine="transformers", device="cpu"), "cuda"),
    ],
)
def test_weights_go_through_host_memory_if_the_devices_differ(config: InferenceConfig, trainer_device: str) -> None:
    assert chosen_transfer(config, trainer_device) in {"shared_memory", "directory"}


def test_external_servers_read_weights_from_a_directory() -> None:
    config = InferenceConfig(engine="transformers", device="cuda", urls=["http://10.0.0.7:8000"])
    assert chosen_transfer(config, "cuda") == "directory"


def test_a_configured_transport_is_used() -> None:
    config = InferenceConfig(engine="transformers", device="cuda", transfer="shared_memory")
    assert chosen_transfer(config, "cuda") == "shared_memory"


def test_weights_go_through_host_memory_if_resources_separate_trainer_and_policy() -> None:
    config = InferenceConfig(engine="transformers", device="cuda")
    assert chosen_transfer(config, "cuda", shares_gpu=False) in {"shared_memory", "directory"}
