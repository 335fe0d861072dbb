"""One real transfer of weights over NCCL, between two GPUs of this machine. Both ends use vLLM's communicator."""

import importlib.util
import multiprocessing
from multiprocessing.connection import Connection

import pytest
import torch

from rollbook.contracts.policy import Publication, PublicationId
from rollbook.inference.vllm.nccl import open_transport
from rollbook.inference.weights.transport import TransportOptions
from rollbook.inference.wire.weights import InitInfo

NEEDED_GPUS = 2
SHAPES = {"embed": (64, 16), "norm": (16,), "head": (16, 64)}


def why_not() -> str | None:
    found = torch.cuda.device_count()
    if found < NEEDED_GPUS:
        return f"no NCCL transfer was made: it needs {NEEDED_GPUS} GPUs, and this machine has {found}"
    if importlib.util.find_spec("vllm") is None:
        return "no NCCL transfer was made: vLLM, whose communicator sends the weights, is not installed"
    return None


def receive(invitation: InitInfo, pipe: Connection) -> None:
    """The other rank, as vLLM's worker: joins the group on the second GPU and sends back what arrives."""
    from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
    from vllm.distributed.utils import StatelessProcessGroup

    torch.cuda.set_device(1)
    group = StatelessProcessGroup.create(
        host=invitation.master_address, port=invitation.master_port, rank=invitation.rank_offset, world_size=2
    )
    communicator = PyNcclCommunicator(group, device=torch.device("cuda", 1))
    arrived = {name: torch.empty(shape, device="cuda:1") for name, shape in SHAPES.items()}
    for tensor in arrived.values():
        communicator.broadcast(tensor, src=0, stream=torch.cuda.current_stream())
    torch.cuda.synchronize()
    pipe.send({name: tensor.cpu().numpy() for name, tensor in arrived.items()})


@pytest.mark.timeout(300)
@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
async def test_weights_that_are_sent_over_nccl_arrive_bit_for_bit() -> None:
    generator = torch.Generator().manual_seed(0)
    weights = {name: torch.randn(shape, generator=generator).cuda(0) for name, shape in SHAPES.items()}
    transport = open_transport("nccl", TransportOptions(directory="", host="127.0.0.1"))
    publication = Publication(id=PublicationId(1), epoch=1, step=1, digest="d")
    location = await transport.put(publication, weights)
    (invitation,) = transport.invitations([1])
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    receiver = context.Process(target=receive, args=(invitation, theirs), daemon=True)
    receiver.start()
    try:
        await transport.assemble(2)
        await transport.send(location)
        assert ours.poll(120), "the receiver got nothing"
        arrived = ours.recv()
    finally:
        await transport.close()
        receiver.kill()
        receiver.join()
    for name, tensor in weights.items():
        assert (arrived[name] == tensor.cpu().numpy()).all(), name
