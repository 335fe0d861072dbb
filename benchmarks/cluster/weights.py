"""The pull transport: one trainer, and 8 replicas on 3 other machines (network namespaces with their own addresses and memory).

Measures the bytes that leave the trainer's machine for one publication, in copies of the weights, and how long one more replica
takes to get the current publication, compared with a publication to all: on a machine that has the weights, and on a new one.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch

from benchmarks.report import Figure, print_figures, print_status
from rollbook.contracts.policy import Publication, PublicationId
from rollbook.inference.weights.client import WeightTransferClient
from rollbook.inference.weights.transport import TransportOptions, open_transport
from rollbook.trainer.model.weights import digest_of
from tests.parts.run.network import Machine, machines

REPLICAS = (3, 3, 2)
"""On each machine."""
REPLICA = "benchmarks.cluster.replica"
TOKEN = "token-of-the-benchmark"
MAX_COPIES = 3.2
PUBLICATIONS = 5
REQUEST_S = 300.0


async def train(host: str, size: int, urls: Sequence[str]) -> None:
    """Publish when a line arrives. The line may add a replica. Prints the seconds of each publication."""
    options = TransportOptions(directory=f"/dev/shm/bench-{os.getpid()}", host=host, token=TOKEN)
    members = list(urls)

    async def source() -> list[str]:
        return members

    async with WeightTransferClient(
        urls, request_s=REQUEST_S, transport=open_transport("pull", options), api_key=TOKEN, source=source
    ) as client:
        number, location, publication = 0, "", None
        while line := await asyncio.to_thread(sys.stdin.readline):
            started = time.perf_counter()
            if line.startswith("http"):
                members.append(line.strip())
            else:
                number += 1
                weights = {"weight": torch.rand(size // 4, generator=torch.Generator().manual_seed(number))}
                publication = Publication(id=PublicationId(number), epoch=1, step=number, digest=digest_of(weights))
                location = await client.put(publication, weights)
                started = time.perf_counter()
            assert publication is not None
            await client.receive(publication, location)
            print(json.dumps(time.perf_counter() - started), flush=True)


@contextmanager
def started(machine: Machine, *arguments: str) -> Iterator["subprocess.Popen[str]"]:
    process = subprocess.Popen(
        machine.command(sys.executable, "-m", *arguments),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path.cwd()), "OMP_NUM_THREADS": "1"},
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def said(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    line = process.stdout.readline().strip()
    if not line:
        raise RuntimeError("a process of the benchmark ended early; its error is above")
    return line


def ask(trainer: "subprocess.Popen[str]", line: str) -> float:
    assert trainer.stdin is not None
    trainer.stdin.write(line + "\n")
    trainer.stdin.flush()
    return float(said(trainer))


def measure(size: int) -> list[Figure]:
    with machines(2 + len(REPLICAS)) as (head, *nodes, new), ExitStack() as stack:
        places = [node for node, count in zip(nodes, REPLICAS, strict=True) for _ in range(count)]
        replicas = [stack.enter_context(started(node, REPLICA, node.address, TOKEN)) for node in places]
        urls = [said(replica) for replica in replicas]
        print_status(f"{len(urls)} replicas on {len(nodes)} machines; {size / 2**20:.0f} MiB of weights")
        trainer = stack.enter_context(
            started(head, "benchmarks.cluster.weights", "--trainer", head.address, "--bytes", str(size), *urls)
        )
        copies, seconds = [], []
        for number in range(PUBLICATIONS):
            before = head.sent_bytes()
            seconds.append(ask(trainer, "publish"))
            copies.append((head.sent_bytes() - before) / size)
            print_status(f"publication {number + 1}: {copies[-1]:.2f} copies left the trainer, {seconds[-1]:.2f} s")
        typical = statistics.median(seconds)
        joined = [
            measure_join(stack, head, trainer, machine, place, size=size, typical_s=typical)
            for place, machine in (("on a machine with the weights", nodes[-1]), ("on a new machine", new))
        ]
    most = max(copies)
    return [
        Figure(
            name="copies that leave the trainer for 8 replicas on 3 machines",
            ours=most,
            peer=MAX_COPIES,
            unit="copies",
            ratio=MAX_COPIES / most,
            floor=1.0,
        ),
        *joined,
    ]


def measure_join(
    stack: ExitStack,
    head: Machine,
    trainer: "subprocess.Popen[str]",
    machine: Machine,
    place: str,
    *,
    size: int,
    typical_s: float,
) -> Figure:
    """One more replica gets the current version."""
    joiner = stack.enter_context(started(machine, REPLICA, machine.address, TOKEN))
    url, sent, received = said(joiner), head.sent_bytes(), machine.received_bytes()
    joined_s = ask(trainer, url)
    copies = {
        "copies_from_trainer": (head.sent_bytes() - sent) / size,
        "copies_received": (machine.received_bytes() - received) / size,
    }
    print_status(f"a replica joins {place}: {joined_s:.2f} s, {copies}")
    return Figure(
        name=f"a replica that joins {place} gets the current version, against a publication to all",
        ours=joined_s,
        peer=typical_s,
        unit="s",
        ratio=typical_s / joined_s,
        floor=1.0,
        more=copies,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bytes", type=int, default=64 * 2**20, help="size of the weights")
    parser.add_argument("--trainer", metavar="HOST", help=argparse.SUPPRESS)
    parser.add_argument("urls", nargs="*", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.trainer:
        asyncio.run(train(args.trainer, args.bytes, args.urls))
        return 0
    return print_figures(measure(args.bytes))


if __name__ == "__main__":
    sys.exit(main())
