"""What router replay costs the ledger: groups of 8 x 1024 tokens with and without the experts of each token (48 layers x 8 choices,
as in Qwen3-30B-A3B), through our client to a real server, in alternating slices.

Prints bytes for each token, CPU time of the server for each group, and groups a second of a client and a server on this machine.
The peer is the ledger without routes. The choices are evenly random, which compresses worst.

    python -m benchmarks.ledger.routes
"""

import argparse
import asyncio
import statistics
import sys
import tempfile

import aiohttp
import msgspec

from benchmarks.ledger.atropos_comparison import TIMEOUT_S, Bench, Cost, ledger
from benchmarks.ledger.bodies import CHOICES, LAYERS, SEQUENCES, TOKENS, native_group
from benchmarks.report import Figure, print_figures, print_status
from rollbook.contracts.admission import RunId, RunSettings
from rollbook.contracts.freshness import FreshnessRule
from rollbook.ledger.client.client import open_ledger_client
from rollbook.ledger.config import Durability
from rollbook.ledger.http import verbs, wire
from rollbook.telemetry.events import EventLog

RUN = RunId("routes")


async def measured(groups: int, slices: int) -> dict[bool, list[tuple[Cost, float]]]:
    """For groups with and without routes: the cost of each slice, and the bytes of a token."""
    found: dict[bool, list[tuple[Cost, float]]] = {False: [], True: []}
    with tempfile.TemporaryDirectory() as home, ledger(home, Durability.PROCESS_CRASH) as server:
        async with aiohttp.ClientSession() as session:
            bench = Bench(server, session)
            headers = {"Content-Type": wire.CONTENT_TYPE, "Authorization": f"Bearer {server.token}"}
            rule = FreshnessRule(groups_per_step=32, max_in_flight=32, max_head_offpolicy_versions=1)
            body = msgspec.msgpack.encode(verbs.CreateRun(settings=RunSettings(rule=rule)))
            await bench.call("PUT", f"/v1/runs/{RUN}", data=body, headers=headers)
            async with open_ledger_client(
                server.url, RUN, request_s=TIMEOUT_S, log=EventLog("bench"), token=server.token
            ) as client:
                for number in range(2 * slices):
                    has_routes, start = bool(number % 2), number * groups
                    made = [native_group(start + n, has_routes=has_routes) for n in range(groups)]
                    of_token = statistics.fmean(len(group.payload) for group in made) / (SEQUENCES * TOKENS)
                    found[has_routes].append((await bench.submit_all(client, made), of_token))
                    print_status(f"  routes {has_routes}: {found[has_routes][-1]}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=48, help="groups in each slice")
    parser.add_argument("--slices", type=int, default=4)
    options = parser.parse_args()
    found = asyncio.run(measured(options.groups, options.slices))

    def median(has_routes: bool, name: str) -> float:
        return statistics.median(float(getattr(cost, name)) for cost, _ in found[has_routes])

    with_routes, without = found[True][0][1], found[False][0][1]
    cpu = (median(True, "cpu_ms"), median(False, "cpu_ms"))
    rate = (median(True, "per_s"), median(False, "per_s"))
    figures = [
        Figure(name="bytes_a_token", ours=with_routes, peer=without, unit="bytes", ratio=without / with_routes),
        Figure(name="ledger_cpu", ours=cpu[0], peer=cpu[1], unit="ms/group", ratio=cpu[1] / cpu[0]),
        Figure(name="ledger_throughput", ours=rate[0], peer=rate[1], unit="groups/s", ratio=rate[0] / rate[1]),
    ]
    return print_figures(figures, tokens_a_group=SEQUENCES * TOKENS, layers=LAYERS, choices=CHOICES)


if __name__ == "__main__":
    sys.exit(main())
