"""Parts of the transports that can be tested without a GPU."""

import asyncio
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollbook.contracts.errors import RunError
from rollbook.contracts.weights import WeightsError
from rollbook.inference.engines.embedded.live_weights import Upload
from rollbook.inference.vllm.client import VllmServerApi, publication_id
from rollbook.inference.vllm.nccl import NcclTransport
from rollbook.inference.weights.safetensors import FileTensor
from rollbook.inference.weights.shared_memory import ABANDONED_S, directory_name
from rollbook.inference.weights.transport import TransportOptions, open_transport
from rollbook.inference.weights.transports import files
from rollbook.inference.weights.transports.cuda_ipc import _packed_on
from rollbook.shared_weights.gpu_handles import decode_handle, encode_handle
from rollbook.shared_weights.packing import NAMES, PackedWeights, headers_of, pack, unpack_views
from rollbook.trainer.model.weights import digest_of
from tests.parts.inference.engines import until
from tests.parts.inference.models import publication

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8]
SHAPES = st.lists(st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 4), max_size=3)), min_size=1, max_size=6)


def weights_of(shapes: list[tuple[torch.dtype, list[int]]]) -> dict[str, torch.Tensor]:
    return {
        f"layer.{index}": torch.arange(int(torch.Size(shape).numel())).to(dtype).reshape(shape)
        for index, (dtype, shape) in enumerate(shapes)
    }


def raw_tensor(name: str, tensor: torch.Tensor) -> FileTensor:
    data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data.cast("B")
    return FileTensor(name=name, dtype=NAMES[tensor.dtype], shape=tuple(tensor.shape), data=data)


@given(SHAPES)
def test_unpacked_tensors_equal_the_packed_ones(shapes: list[tuple[torch.dtype, list[int]]]) -> None:
    weights = weights_of(shapes)
    headers, packed = headers_of(weights), pack(weights)
    for name, tensor in unpack_views(packed, headers).items():
        assert torch.equal(tensor, weights[name])
        assert tensor.dtype == weights[name].dtype
    assert digest_of(unpack_views(packed, headers)) == digest_of(weights)


@given(SHAPES, st.integers(1, 200))
def test_uploaded_tensors_equal_those_in_main_memory(
    shapes: list[tuple[torch.dtype, list[int]]], window_bytes: int
) -> None:
    weights = weights_of(shapes)
    upload = Upload(torch.device("cpu"), window_bytes=window_bytes)
    for _ in range(2):  # windows are used again
        uploaded = upload([raw_tensor(name, tensor) for name, tensor in weights.items()])
        assert {name: (t.dtype, t.tolist()) for name, t in uploaded.items()} == {
            name: (t.dtype, t.tolist()) for name, t in weights.items()
        }


def test_bytes_that_do_not_fit_the_shapes_are_refused() -> None:
    weights = {"a": torch.zeros(3)}
    with pytest.raises(WeightsError, match="received 5 bytes"):
        unpack_views(torch.zeros(5, dtype=torch.uint8), headers_of(weights))
    with pytest.raises(WeightsError, match="dtype"):
        unpack_views(pack(weights), [("a", "F4", (3,))])


def test_a_gpu_handle_is_plain_json_and_finds_the_gpu_under_another_index() -> None:
    parts = [0, b"\x00\xff handle", 1024, 0, b"counter", 3, b"event", True]
    handle = encode_handle(parts, gpu="GPU-aa")
    assert decode_handle(handle, local_gpus={"GPU-bb": 0, "GPU-aa": 1}) == [1, *parts[1:]]


@pytest.mark.parametrize(
    "handle",
    [{"gpu": "GPU-zz", "parts": []}, {"gpu": "GPU-aa", "parts": [{"bytes": "not base64!"}]}, {"gpu": "GPU-aa"}],
)
def test_an_invalid_handle_is_refused(handle: dict[str, Any]) -> None:
    with pytest.raises(WeightsError):
        decode_handle(handle, local_gpus={"GPU-aa": 0})


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
@pytest.mark.parametrize("transport", ["cuda_ipc", "nccl"])
def test_a_transport_that_needs_a_gpu_is_refused_without_one(transport: str) -> None:
    with pytest.raises(RunError, match="CUDA"):
        open_transport(transport, TransportOptions(directory="unused"))


class RecordingCommunicator:
    """Has the methods of vLLM's communicator and records the sent tensors."""

    sent: list[tuple[torch.Tensor, int]]

    def __init__(self, group: Any, device: Any) -> None:
        self.group, self.sent, self.is_destroyed = group, [], False

    def broadcast(self, tensor: torch.Tensor, *, src: int, stream: Any) -> None:
        self.sent.append((tensor, src))

    def destroy(self) -> None:
        self.is_destroyed = True


async def test_nccl_invites_and_sends_as_vllms_receiver_expects(monkeypatch: pytest.MonkeyPatch) -> None:
    class Group:
        @staticmethod
        def create(**settings: Any) -> dict[str, Any]:
            return settings

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    transport = NcclTransport(host="127.0.0.1", communicator=RecordingCommunicator, group=Group)
    weights = {"b": torch.ones(2, 3, dtype=torch.bfloat16), "a": torch.zeros(4)}
    offered = publication(5, "d")
    location = await transport.put(offered, weights)
    first, second = transport.invitations([2, 1])
    assert (first.rank_offset, second.rank_offset, first.world_size) == (1, 3, 4)
    await transport.assemble(4)
    joined = transport._joined
    assert joined.group == {"host": "127.0.0.1", "port": first.master_port, "rank": 0, "world_size": 4}
    info = VllmServerApi("nccl")._update_info(transport.update_info(offered, location))
    assert info == {"names": ["b", "a"], "dtype_names": ["bfloat16", "float32"], "shapes": [[2, 3], [4]]}
    weights["a"].fill_(9)
    await transport.send(location)
    assert [(tuple(tensor.shape), src) for tensor, src in joined.sent] == [((2, 3), 0), ((4,), 0)]
    assert joined.sent[1][0].sum() == 0, "later changes of the trainer must not be sent"
    await transport.close()
    assert joined.is_destroyed


def test_vllm_versions_that_are_not_publications_are_older_than_any() -> None:
    assert [publication_id(version) for version in ("default", "7", "nightly")] == [-1, 7, -1]


async def test_weights_of_a_killed_run_are_removed_from_shared_memory_by_a_later_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "SHARED", tmp_path)
    in_use = files.open_transport("shared_memory", TransportOptions(directory="in-use"))
    killed, fresh, open_to_all = (tmp_path / directory_name(name) for name in ("killed", "fresh", "open"))
    for directory in (killed, fresh, open_to_all):
        directory.mkdir(mode=0o700)
        (directory / "publication-00000001").mkdir()
    open_to_all.chmod(0o777)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    link = tmp_path / directory_name("link")
    link.symlink_to(elsewhere)
    mine = set(tmp_path.iterdir()) - {killed, fresh, open_to_all, elsewhere, link}
    long_ago = time.time() - 2 * ABANDONED_S
    for directory in {*tmp_path.iterdir()} - {fresh}:
        os.utime(directory, (long_ago, long_ago))

    later = files.open_transport("shared_memory", TransportOptions(directory="later"))
    assert not killed.exists()
    assert all(path.exists() for path in (fresh, open_to_all, link, elsewhere, *mine))
    await later.close()
    await in_use.close()
    assert set(tmp_path.iterdir()) == {fresh, open_to_all, link, elsewhere}


async def test_a_replaced_trainer_does_not_remove_the_weights_of_its_successor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "SHARED", tmp_path)
    replaced, successor = (files.open_transport("shared_memory", TransportOptions(directory="run")) for _ in range(2))
    location = await successor.put(publication(2, "d"), {"a": torch.zeros(4)})
    await replaced.close()
    assert Path(location).exists()
    await successor.put(publication(3, "d"), {"a": torch.zeros(4)})
    await successor.close()
    assert not list(tmp_path.iterdir())


def test_a_host_that_is_not_of_this_machine_is_refused_with_the_name_of_its_setting() -> None:
    transport = NcclTransport(host="192.0.2.1", communicator=None, group=None)
    with pytest.raises(RunError, match=r"inference\.transfer_host = '192\.0\.2\.1'"):
        transport.invitations([1])


async def test_an_nccl_group_that_is_formed_after_its_deadline_is_destroyed(monkeypatch: pytest.MonkeyPatch) -> None:
    is_complete, formed = threading.Event(), list[RecordingCommunicator]()

    class SlowGroup:
        @staticmethod
        def create(**settings: Any) -> dict[str, Any]:
            is_complete.wait(10)
            return settings

    def communicator(group: Any, device: Any) -> RecordingCommunicator:
        formed.append(RecordingCommunicator(group, device))
        return formed[0]

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    transport = NcclTransport(host="127.0.0.1", communicator=communicator, group=SlowGroup)
    transport.invitations([1])
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await transport.assemble(2)
    is_complete.set()
    await until(lambda: bool(formed) and formed[0].is_destroyed)


def test_weights_that_were_copied_in_one_block_are_not_packed_again() -> None:
    weights = {"a": torch.arange(5, dtype=torch.bfloat16), "b": torch.ones(3, 4)}
    packed = PackedWeights(weights, device="cpu")
    assert all(torch.equal(packed[name], weights[name]) for name in weights)
    assert _packed_on("cpu", packed) is packed.block
    assert packed["b"].untyped_storage().data_ptr() == packed.block.untyped_storage().data_ptr()
    views = unpack_views(packed.block, headers_of(weights))
    assert all(torch.equal(views[name], weights[name]) for name in weights)
