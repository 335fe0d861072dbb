"""Which policy servers a run starts, and where they will be."""

import socket

from rollbook.inference.config import InferenceConfig


def replica_names(config: InferenceConfig) -> list[str]:
    """`policy`, `policy-1`, `policy-2` …; none where the servers run elsewhere."""
    if config.urls:
        return []
    return ["policy", *(f"policy-{number}" for number in range(1, config.replicas))]


def free_url() -> str:
    """An address for a server that binds its port itself, as vLLM does. Ours are given a socket that is open already."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return f"http://127.0.0.1:{probe.getsockname()[1]}"
