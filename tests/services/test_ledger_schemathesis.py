"""Schemathesis generates requests from both OpenAPI documents."""

import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from tests.parts.ledger.run_api import running_api

EXAMPLES = 8
TIMEOUT_S = 900


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT_S + 60)
@pytest.mark.parametrize("document", ["/openapi.json", "/atropos/atropos/openapi.json"], ids=["native", "atropos"])
def test_schemathesis_finds_no_server_error(tmp_path: Path, document: str) -> None:
    with running_api(f"sqlite:///{tmp_path}") as api:
        api.wait_until_listening()
        command = [sys.executable, "-m", "schemathesis.cli", "run", f"{api.url}{document}", "--url", api.url]
        options = ["--checks", "not_a_server_error", "--phases", "coverage,fuzzing", "--max-examples", str(EXAMPLES)]
        stable = ["--seed", "1", "--request-timeout", "60", "--suppress-health-check", "all"]
        done = subprocess.run(
            [*command, *options, *stable], capture_output=True, text=True, timeout=TIMEOUT_S, cwd=tmp_path, check=False
        )
        assert done.returncode == 0, done.stdout[-4000:]
        assert "passed" in done.stdout
        with urllib.request.urlopen(f"{api.url}/health") as answer:
            assert answer.status == 200
