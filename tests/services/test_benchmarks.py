"""The benchmarks run: on the smallest sizes, each ends with its figures. What they measure is not looked at."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.loop.defaults import used_by
from tests.parts.run.small import REPOSITORY

ATROPOS = REPOSITORY / ".venvs" / "atropos" / "bin" / "python"
SMALLEST = {
    "access.hostile": "--servers dashboard metrics --max-mb 0.1",
    "ledger.history": "--sizes 100 200",
    "ledger.atropos_comparison": "--groups 8 --peer-groups 8 --seconds 1 --rounds 1 --touch-gb 0",
    "engine.serving": "--processes 1 --requests 64 --in-flight 16 --repeats 1",
    "engine.cpu": "--requests 8 --rounds 1",
    "trainer.gil": "--rounds 1 --round-s 0.5",
    "loop.episodes": "--episodes 400 800",
    "loop.overlap": "--steps 4",
    "loop.startup": "--repetitions 1",
    "loop.out_of_memory": "--tiny --cases plan trainer passes",
    "loop.defaults": "--tiny",
    "engine.gpu_checks": "--tiny --parts shared_base",
    "engine.families": "--tiny --only gpt-oss-20B",
}


@pytest.mark.parametrize(
    ("used", "expected"),
    [
        ({11: 5, 14: 7}, {"policy": 5, "trainer": 7}),
        ({90_011: 5, 90_020: 7}, {"policy": 5, "trainer": 7}),
        ({14: 7}, {"trainer": 7}),
        ({90_011: 5}, {}),
        ({90_011: 5, 90_020: 7, 90_021: 1}, {}),
    ],
    ids=["known numbers", "numbers of another container", "one so far", "one of two", "another program"],
)
def test_memory_of_a_gpu_is_told_apart_by_process(used: dict[int, int], expected: dict[str, int]) -> None:
    assert used_by({"trainer": 14, "policy": 11}, used) == expected


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", SMALLEST)
def test_a_benchmark_ends_with_its_figures(name: str, tmp_path: Path) -> None:
    if name == "ledger.atropos_comparison" and not ATROPOS.is_file():
        pytest.skip("make test-atropos installs the original server")
    command = [sys.executable, "-m", f"benchmarks.{name}", *SMALLEST[name].split()]
    with (tmp_path / "errors.txt").open("w") as errors:
        ended = subprocess.run(command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=errors, text=True, check=False)
    assert ended.stdout, (tmp_path / "errors.txt").read_text()[-4000:]
    figures = json.loads(ended.stdout.splitlines()[-1])["figures"]
    assert figures
    assert all({"name", "ours", "ratio", "ok"} <= figure.keys() for figure in figures)
