"""Two trainer ranks on two machines in network namespaces: the bits of two local ones, and the end of both when one is lost."""

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.parts.run.network import Machine, machines
from tests.parts.run.small import REPOSITORY

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
STEPS = 3
ENDS_WITHIN_S = 300
"""On a busy machine. A collective would wait for 600 s."""


def start(machine: Machine | None, part: str, directory: Path, steps: int, *options: str) -> "subprocess.Popen[str]":
    host = "" if machine is None else machine.address
    command = [sys.executable, "-m", "tests.parts.trainer.rank_main", part, str(directory), host, str(steps), *options]
    return subprocess.Popen(
        command if machine is None else machine.command(*command),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"},
    )


@pytest.fixture
def pair() -> Iterator[Sequence[Machine]]:
    with machines(2) as made:
        yield made


@pytest.mark.parametrize("trained", ["all weights", "adapters"])
def test_two_ranks_on_two_machines_end_with_the_bits_of_two_local_ones(
    pair: Sequence[Machine], tmp_path: Path, trained: str
) -> None:
    digests = []
    for name, places in (("local", (None, None)), ("remote", pair)):
        (tmp_path / name).mkdir()
        lead = start(places[0], "lead", tmp_path / name, STEPS, trained)
        rank = start(places[1], "follow", tmp_path / name, STEPS) if places[1] is not None else None
        out, errors = lead.communicate()
        assert lead.returncode == 0, errors
        if rank is not None:
            assert (rank.communicate(), rank.returncode) == (("", ""), 0)
        digests.append(out.split())
    assert len(digests[0]) == STEPS
    assert digests[0] == digests[1]


@pytest.mark.parametrize("fault", ["killed", "cut off"])
def test_the_loss_of_a_rank_ends_the_others(pair: Sequence[Machine], tmp_path: Path, fault: str) -> None:
    lead = start(pair[0], "lead", tmp_path, 1_000_000)
    rank = start(pair[1], "follow", tmp_path, 0)
    assert lead.stdout is not None
    assert lead.stdout.readline(), lead.communicate()[1]
    if fault == "killed":
        rank.kill()
    else:
        subprocess.run(pair[1].command("ip", "link", "set", "eth0", "down"), check=True)
    _, errors = lead.communicate(timeout=ENDS_WITHIN_S)
    assert lead.returncode != 0
    assert "trainer rank 1" in errors or "Connection" in errors, errors
    rank.communicate(timeout=ENDS_WITHIN_S)
    assert rank.returncode != 0
