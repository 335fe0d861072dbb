"""The cost of the AWS environment: a step against the naive method, one `aws` process for each command; and pools of 8 and 32.

    python -m benchmarks.envs.aws            prints one JSON object as its last line

Both methods alternate, command by command, on the same simulator, so they run under the same load. Ours includes the checks for
grading; the naive figure does not. Memory is the proportional set size: shared pages are counted once.
"""

import argparse
import asyncio
import json
import os
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil

from rollbook.concurrency.deadline import Deadline
from rollbook.envs.builtin.awscli.cloud.backend import open_cloud_pool
from rollbook.envs.builtin.awscli.config import AwsCliConfig
from rollbook.envs.builtin.awscli.environment import AwsCliEnvironment, AwsCliPool
from rollbook.telemetry.events import EventLog

REPETITIONS = 4
POOLS = (8, 32)
COMMANDS = (
    "aws s3api create-bucket --bucket bucket-{n}",
    "aws s3api list-buckets",
    "aws sqs create-queue --queue-name queue-{n}",
    "aws sqs list-queues",
    "aws iam create-user --user-name user-{n}",
    "aws iam list-users",
    "aws dynamodb list-tables",
    "aws ec2 describe-vpcs",
    "aws s3 ls",
)
TASK = {
    "id": "benchmark",
    "tier": "beginner",
    "services": ["s3", "sqs"],
    "goal": "Something that never comes true.",
    "checks": [
        {"says": "bucket", "call": "s3.list_buckets", "query": "Buckets[].Name", "contains": "never"},
        {"says": "queue", "call": "sqs.get_queue_url", "with": {"QueueName": "never"}, "query": "QueueUrl"},
    ],
    "solution": ["aws s3 ls"],
    "hints": ["none", "of", "these"],
    "max_steps": 1_000_000,
}


async def measure_steps() -> dict[str, Any]:
    """Median wall time and CPU time of a step with both methods, and their ratio."""
    args = {"base_port": 0}
    async with AwsCliEnvironment.open_pool(size=1, log=EventLog("bench"), args=args) as pool:
        assert isinstance(pool, AwsCliPool)
        env = await pool.acquire(Deadline(60.0, "benchmark"))
        await env.reset(TASK)
        cloud = pool.simulators.sandboxes[0]
        for command in COMMANDS:  # the first command of a service loads its description
            await env.step(command.format(n=0))
        ours_ms: list[float] = []
        naive_ms: list[float] = []
        ours_cpu_s = naive_cpu_s = 0.0
        for n in range(1, REPETITIONS + 1):
            for command in COMMANDS:
                line = command.format(n=n)
                cpu, start = tree_cpu_s(), time.perf_counter()
                observation = await env.step(line)
                ours_ms.append((time.perf_counter() - start) * 1e3)
                ours_cpu_s += tree_cpu_s() - cpu
                if "exit code" in observation.text:
                    raise RuntimeError(f"`{line}` failed: {observation.text}")
                cpu, start = children_cpu_s(), time.perf_counter()
                await asyncio.to_thread(naive, line.replace(f"-{n}", f"-naive-{n}"), cloud.port)
                naive_ms.append((time.perf_counter() - start) * 1e3)
                naive_cpu_s += children_cpu_s() - cpu
        await env.close()
    return {
        "aws_step": round(statistics.median(naive_ms) / statistics.median(ours_ms), 1),
        "aws_step_cpu": round(naive_cpu_s / max(ours_cpu_s, 1e-9), 1),
        "steps": len(ours_ms),
        "ours_ms": summary(ours_ms),
        "naive_ms": summary(naive_ms),
        "ours_cpu_ms": round(ours_cpu_s * 1e3 / len(ours_ms), 1),
        "naive_cpu_ms": round(naive_cpu_s * 1e3 / len(naive_ms), 1),
    }


def naive(line: str, port: int) -> None:
    """One step of an environment without a warm worker."""
    environment = {
        "PATH": os.environ["PATH"],
        "AWS_ACCESS_KEY_ID": "111122223333",
        "AWS_SECRET_ACCESS_KEY": "x",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    executable = shutil.which("aws", path=str(Path(sys.executable).parent)) or "aws"
    words = [executable, *line.split()[1:], "--endpoint-url", f"http://127.0.0.1:{port}"]
    subprocess.run(words, env=environment, check=True, capture_output=True)


async def measure_pool(size: int) -> dict[str, Any]:
    """Time and CPU time until the pool is ready, and its memory when idle."""
    cpu, start = tree_cpu_s(), time.perf_counter()
    config = AwsCliConfig(pool_size=size, base_port=0)
    async with open_cloud_pool(config, log=EventLog("bench")) as pool:
        ready_s = time.perf_counter() - start
        cpu_s = tree_cpu_s() - cpu
        children = psutil.Process().children(recursive=True)
        memory_mb = sum(child.memory_full_info().pss for child in children) / 2**20
        acquire_ms = []
        for _ in range(size):
            began = time.perf_counter()
            await pool.acquire(Deadline(60.0, "benchmark"))
            acquire_ms.append((time.perf_counter() - began) * 1e3)
        closing = time.perf_counter()
    return {
        "size": size,
        "ready_s": round(ready_s, 2),
        "cpu_s": round(cpu_s, 2),
        "processes": len(children),
        "memory_mb": round(memory_mb),
        "memory_mb_each": round(memory_mb / size, 1),
        "acquire_ms": summary(acquire_ms),
        "close_s": round(time.perf_counter() - closing, 2),
    }


def tree_cpu_s() -> float:
    """CPU seconds of this process, of its running children and of its ended children."""
    children = psutil.Process().children(recursive=True)
    running = sum(sum(process.cpu_times()[:4]) for process in children)
    own = psutil.Process().cpu_times()
    return running + own.user + own.system + children_cpu_s()


def children_cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def summary(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {
        "median": round(statistics.median(ordered), 1),
        "p10": round(ordered[len(ordered) // 10], 1),
        "p90": round(ordered[(9 * len(ordered)) // 10], 1),
    }


async def main() -> None:
    load = os.getloadavg()[0]
    report: dict[str, Any] = {
        "benchmark": "envs_aws",
        "machine": {"cpus": os.cpu_count(), "python": platform.python_version(), "load_before": round(load, 2)},
        "steps": await measure_steps(),
        "pools": [await measure_pool(size) for size in POOLS],
    }
    print(json.dumps(report))


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    asyncio.run(main())
