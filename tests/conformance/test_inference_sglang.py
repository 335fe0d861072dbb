"""What is checked of SGLang without a GPU: our requests against the classes of the package, and failed updates.

`test_inference_policy.py` runs the whole suite of policy servers against a stand-in with SGLang's wire format.
"""

from pathlib import Path

import aiohttp
import pytest

from rollbook.contracts.errors import TransientError
from rollbook.contracts.policy import SamplingParams
from rollbook.inference.config import InferenceConfig
from rollbook.inference.connection import PolicyConnection
from rollbook.inference.engine import open_engine
from rollbook.inference.sglang.client import SglangServerApi, sampling_params
from rollbook.inference.wire.weights import UpdateInfo
from tests.parts.inference.chat_model import chat_model
from tests.parts.inference.sglang import PUBLISHED, SOURCE, SamplingBody, Strict, published_fields, serve_stand_in

needs_source = pytest.mark.skipif(not SOURCE.exists(), reason="make test-sglang installs the source of SGLang")


@needs_source
@pytest.mark.parametrize("body", PUBLISHED, ids=lambda body: body.__name__)
def test_every_field_that_is_sent_is_one_of_sglang(body: type[Strict]) -> None:
    published = published_fields(*PUBLISHED[body])
    assert set(body.__struct_fields__) <= published.keys()


@needs_source
def test_every_route_and_field_of_a_response_is_one_of_sglang() -> None:
    server = (SOURCE / "entrypoints" / "http_server.py").read_text(encoding="utf-8")
    routes = ("/generate", "/pause_generation", "/continue_generation", "/update_weights_from_disk")
    for route in (*routes, "/update_weight_version", "/model_info"):
        assert f'"{route}"' in server
    assert '"/v1/loads"' in (SOURCE / "entrypoints" / "v1_loads.py").read_text(encoding="utf-8")
    loads = (SOURCE / "managers" / "load_snapshot.py").read_text(encoding="utf-8")
    assert "num_running_reqs: int" in loads
    assert "num_waiting_reqs: int" in loads
    manager = (SOURCE / "managers" / "tokenizer_manager.py").read_text(encoding="utf-8")
    for field in ("output_ids", "output_token_logprobs", "finish_reason"):
        assert f'"{field}"' in manager
    spans = (SOURCE / "utils" / "weight_versions.py").read_text(encoding="utf-8")
    assert 'meta_info["weight_versions"]' in spans
    modes = published_fields("managers/io_struct.py", "PauseGenerationReqInput")["mode"]
    assert "'retract'" in modes
    assert "'abort'" in modes


def test_sampling_parameters_have_the_names_of_sglang() -> None:
    sent = sampling_params(SamplingParams(max_tokens=3, seed=5, stop_token_ids=(7,)))
    assert set(sent) == set(SamplingBody.__struct_fields__)
    assert sent["top_k"] == -1, "all tokens"


async def test_weights_of_a_failed_update_belong_to_no_publication(tmp_path: Path) -> None:
    config = InferenceConfig(max_model_len=64, max_running=2)
    missing = UpdateInfo(publication=4, epoch=1, step=4, digest="", path=str(tmp_path / "none" / "weights.safetensors"))
    api = SglangServerApi()
    async with (
        open_engine(config, chat_model(tmp_path / "model", seed=1, is_tied=True)) as engine,
        serve_stand_in(engine) as url,
        aiohttp.ClientSession(headers={"Content-Type": "application/json"}) as session,
    ):
        replica = PolicyConnection(session, url)
        assert api.exactness(replica).inexact_because == "SGLang computes with kernels of its own"
        with pytest.raises(TransientError, match="no weights in"):
            await api.update(replica, missing)
        assert await api.publication(replica) is None
        assert not engine.is_paused
        with pytest.raises(ValueError, match="'wait'"):
            await api.pause(replica, "wait")
        with pytest.raises(ValueError, match="directory"):
            await api.update(replica, UpdateInfo(publication=4, epoch=1, step=4, digest=""))
