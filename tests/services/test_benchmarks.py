"""The benchmarks run: on the smallest sizes, each ends with its figures. What they measure is not looked at."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.loop.observers import Kills, used_by
from rollbook.run.directory import RunDirectory
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
    "engine.gpu_checks": "--tiny --parts shared_base eight_bits",
    "engine.families": "--tiny --only gpt-oss-20B",
}


CHILDREN = {"cluster/replica.py", "engine/loop.py", "engine/vllm_side.py", "trainer/trl_step.py"}
"""Programs that other benchmarks start."""


def test_every_benchmark_has_a_help_with_what_it_measures() -> None:
    parser = "argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)"
    folder = REPOSITORY / "benchmarks"
    texts = {str(file.relative_to(folder)): file.read_text(encoding="utf-8") for file in folder.rglob("*.py")}
    assert [
        name for name, text in texts.items() if "__main__" in text and parser not in text and name not in CHILDREN
    ] == []


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


def test_kills_alternate_and_name_the_processes_that_had_to_be_restarted_with_their_victim(tmp_path: Path) -> None:
    children = {role: subprocess.Popen(["sleep", "600"]) for role in ("policy", "trainer", "base")}
    restarts = dict.fromkeys(children, 0)

    def write(*, ready: bool = True) -> None:
        rows = {
            role: {"pid": child.pid, "ready": ready, "restarts": restarts[role]} for role, child in children.items()
        }
        RunDirectory(tmp_path).processes_file.write_text(json.dumps({"processes": rows}), encoding="utf-8")

    def restart(role: str) -> None:
        children[role].kill()
        children[role].wait()
        children[role] = subprocess.Popen(["sleep", "600"])
        restarts[role] += 1

    try:
        kills = Kills(tmp_path, rounds=1)
        write()
        kills.next(0, 1)
        assert [role for role, child in children.items() if _has_died(child)] == ["policy"]
        kills.next(0, 1)
        write(ready=False)
        kills.next(0, 2)
        assert kills.done == 1, "neither in the same step nor while a process starts"
        restart("policy")
        write()
        kills.next(0, 3)
        assert (kills.done, kills.alone, _has_died(children["trainer"])) == (2, 1, True)
        restart("trainer")
        restart("base")
        write()
        kills.next(0, 4)
        assert (kills.done, kills.alone, kills.others) == (2, 1, ["base after kill 2 (trainer)"])
    finally:
        for child in children.values():
            child.kill()
            child.wait()


def _has_died(child: subprocess.Popen[bytes]) -> bool:
    try:
        return child.wait(0.2) != 0
    except subprocess.TimeoutExpired:
        return False


@pytest.mark.slow
@pytest.mark.timeout(900)
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
