"""The dashboard of a live run: served by a separate process, whose death does not affect the run."""

import json
import urllib.request
from pathlib import Path
from typing import Any

from tests.parts.run.small import SmallRun

STEPS = 12


def get(url: str, path: str) -> Any:
    with urllib.request.urlopen(f"{url}{path}", timeout=60) as response:
        return json.load(response)


def test_a_killed_dashboard_is_restarted_and_the_run_finishes(tmp_path: Path) -> None:
    run = SmallRun(tmp_path, [f"trainer.max_steps={STEPS}"])
    run.has_dashboard = True
    run.start()
    try:
        run.until(lambda: run.pid("dashboard") and run.step() >= 1, what="step 1 and the dashboard")
        url = json.loads((run.directory / "addresses.json").read_text(encoding="utf-8"))["dashboard"]
        assert get(url, "/api/run")["state"] == "running"
        run.kill("dashboard")
        # The socket belongs to the supervisor: a request waits until the next process serves it.
        assert get(url, "/api/groups")["total"] > 0
        summary = run.wait()
    finally:
        run.stop()
    assert (summary["exit_code"], summary["steps"]) == (0, STEPS), summary["stderr"]
    assert f"dashboard: {url}" in summary["stderr"]
