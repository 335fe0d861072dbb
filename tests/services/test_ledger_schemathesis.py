"""Somebody else's fuzzer reads both OpenAPI documents and makes up requests: never a 5xx, and the service lives."""

import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from tests.parts.ledger.run_api import running_api

EXAMPLES = 8
PATIENCE_S = 900


@pytest.mark.slow
@pytest.mark.timeout(PATIENCE_S + 60)
@pytest.mark.parametrize("document", ["/openapi.json", "/atropos/atropos/openapi.json"], ids=["native", "atropos"])
def test_no_request_made_from_the_document_is_answered_with_a_server_error(tmp_path: Path, document: str) -> None:
    with running_api(f"sqlite:///{tmp_path}") as api:
        api.wait_until_listening()
        command = [sys.executable, "-m", "schemathesis.cli", "run", f"{api.url}{document}", "--url", api.url]
        options = ["--checks", "not_a_server_error", "--phases", "coverage,fuzzing", "--max-examples", str(EXAMPLES)]
        calm = ["--seed", "1", "--request-timeout", "60", "--suppress-health-check", "all"]
        done = subprocess.run(
            [*command, *options, *calm], capture_output=True, text=True, timeout=PATIENCE_S, cwd=tmp_path, check=False
        )
        assert done.returncode == 0, done.stdout[-4000:]
        assert "passed" in done.stdout
        with urllib.request.urlopen(f"{api.url}/health") as answer:
            assert answer.status == 200
