"""`resources.mps`: when a run has a server, which GPUs its clients see, and what is said of servers of other programs."""

import os
import shutil
import tempfile
import tomllib
from pathlib import Path

import pytest
import tomli_w

from rollbook.commands.checks.doctor import examine
from rollbook.commands.checks.findings import Verdict
from rollbook.commands.training.train import resolve_run
from rollbook.run.config.run import RunConfig, dump_toml, load_config, load_resolved_config
from rollbook.run.directory import RunDirectory
from rollbook.run.resources import mps
from rollbook.run.resources.automatic import Resolution, resolve
from rollbook.run.resources.machine import GB, Gpu, Machine
from rollbook.run.resources.memory_plan import gpu
from rollbook.run.supervision.plan import plan_run
from tests.parts.run.mps_stand_in import install
from tests.parts.run.projects import project
from tests.parts.run.small import EXAMPLE

GPUS = tuple(Gpu(number=n, name="NVIDIA H200", memory_bytes=150 * GB, uuid=f"GPU-{n}abc") for n in range(3))
WITH_GPU = Machine(gpus=GPUS[:1], cores=16, memory_bytes=128 * GB)


@pytest.fixture(autouse=True)
def _one_program_and_no_other_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", install(tmp_path / "bin")["PATH"])
    monkeypatch.delenv(mps.PIPES, raising=False)
    monkeypatch.setattr(mps, "DEFAULT_PIPES", tmp_path / "none")
    monkeypatch.setattr("rollbook.commands.checks.doctor._run", lambda code: (0, "1.0"))


LORA = "trainer.lora.rank=16"


def resolved(file: Path, *overrides: str, machine: Machine = WITH_GPU, recorded: RunConfig | None = None) -> Resolution:
    return resolve(load_config(file, overrides), machine, recorded=recorded)


def required(file: Path, *overrides: str, machine: Machine = WITH_GPU) -> Resolution:
    return resolved(file, "resources.mps=true", *overrides, machine=machine)


def mps_texts(found: Resolution) -> list[str]:
    return [line for line in found.lines() if line.startswith("mps:")]


def test_a_run_on_one_gpu_may_have_a_server_which_the_table_and_the_plan_show(tmp_path: Path) -> None:
    file = project(tmp_path, "1.5b")
    found = required(file)
    assert found.faults() == []
    (line,) = mps_texts(found)
    assert (
        line == f"mps: a server of this run ({tmp_path}/bin/{mps.PROGRAM}), for trainer, policy servers and shared base"
    )
    assert found.plan is not None
    assert found.plan.by_process(gpu(0))["mps"] == 75_000_000
    without = resolved(file, "resources.mps=false")
    assert mps_texts(without) == []
    assert without.plan is not None
    assert "mps" not in without.plan.by_process(gpu(0))


@pytest.mark.parametrize(
    ("overrides", "machine", "reason"),
    [
        ((), Machine(cores=4), "no process of this run uses an NVIDIA GPU"),
        (("trainer.device=cuda", "inference.device=cuda"), Machine(cores=4), "this machine has no NVIDIA GPU"),
        (("inference.device=cpu",), WITH_GPU, "no two processes of this run share a GPU"),
        (
            ("resources.trainer_gpus=[0]", "resources.policy_gpus=[1]"),
            Machine(gpus=GPUS, cores=16, memory_bytes=128 * GB),
            "no two processes of this run share a GPU",
        ),
        (("cluster.allow_join=true",), WITH_GPU, "Remove the settings of [cluster]"),
    ],
)
def test_a_server_that_nothing_would_share_or_that_cannot_run_is_refused_with_what_to_do(
    tmp_path: Path, overrides: tuple[str, ...], machine: Machine, reason: str
) -> None:
    faults = required(project(tmp_path, "1.5b"), *overrides, machine=machine).faults()
    (fault,) = [fault for fault in faults if fault.path == "resources.mps"]
    assert reason in fault.message
    assert fault.message.endswith("or remove resources.mps")


def test_a_missing_program_and_a_long_directory_of_sockets_are_refused_on_this_machine_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = required(project(tmp_path, "1.5b"))
    with monkeypatch.context() as changed:
        changed.setattr(tempfile, "tempdir", f"/tmp/{'long' * 20}")
        (fault,) = found.faults()
        assert "paths of Unix sockets allow 80. Set TMPDIR to a shorter directory, such as /tmp" in fault.message
    shutil.rmtree(tmp_path / "bin")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    (fault,) = found.faults()
    assert f"{mps.PROGRAM} is not on the PATH. It comes with NVIDIA's driver" in fault.message
    assert found.faults(needs_machine=False) == []
    (doctor,) = [finding for finding in examine(tmp_path) if finding.name == "mps"]
    assert (doctor.verdict, doctor.found) == (Verdict.ABSENT, f"no {mps.PROGRAM}")


def other_program(tmp_path: Path, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server of another program: this test process stands in for it."""
    place.mkdir()
    (place / mps.PID_FILE).write_text(f"{os.getpid()}\n", encoding="ascii")
    monkeypatch.setattr(mps, "COMMAND", Path(f"/proc/{os.getpid()}/comm").read_text(encoding="utf-8").strip())


@pytest.mark.skipif(not Path("/proc/self/comm").exists(), reason="processes are read from /proc")
def test_a_server_of_another_program_is_named_with_what_happens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, place = project(tmp_path, "1.5b"), tmp_path / "nvidia-mps"
    other_program(tmp_path, place, monkeypatch)
    monkeypatch.setattr(mps, "DEFAULT_PIPES", place)
    own, none = required(file), resolved(file, "resources.mps=false")
    found = f"an MPS server of another program runs here (in {place}, pid {os.getpid()})"
    assert any(line.endswith(f"{found}, which this run does not use and leaves alone") for line in own.lines())
    assert f"mps: {found}; processes of this run use it. The run did not start it and does not stop it" in none.lines()
    monkeypatch.setenv(mps.PIPES, str(tmp_path / "elsewhere"))
    (line,) = mps_texts(none)
    assert f"is configured ({mps.PIPES}={tmp_path}/elsewhere; no process of it is visible here)" in line
    (doctor,) = [finding for finding in examine(tmp_path) if finding.name == "mps"]
    assert doctor.verdict is Verdict.OK
    assert "elsewhere" in doctor.found


@pytest.mark.parametrize("overrides", [(), (LORA,)])
def test_a_trainer_and_a_policy_server_get_an_optional_server_which_a_resumed_run_keeps(
    tmp_path: Path, overrides: tuple[str, ...]
) -> None:
    file = project(tmp_path, "1.5b")
    found = resolved(file, *overrides)
    assert found.faults() == []
    assert found.chosen["resources.mps"] == "optional"
    assert [line.partition(" (")[0] for line in mps_texts(found)] == ["mps: a server of this run"]
    assert found.plan is not None
    assert found.plan.by_process(gpu(0))["mps"] == 75_000_000
    directory = RunDirectory(tmp_path / "run")
    directory.path.mkdir()
    directory.write_manifest(name="run", source_dir=file.parent)
    directory.config_file.write_text(dump_toml(found.loaded.config), encoding="utf-8")

    def resumed(source: Path, *others: str) -> object:
        recorded = load_resolved_config(directory).config
        loaded, _ = resolve_run(source, directory.path, (*overrides, *others))
        return resolve(loaded, WITH_GPU, recorded=recorded).loaded.config.resources.mps

    assert [resumed(source) for source in (file, directory.path)] == ["optional", "optional"]
    # Runs that were recorded before there was a choice have no server.
    table = tomllib.loads(directory.config_file.read_text(encoding="utf-8"))
    del table["resources"]["mps"]
    directory.config_file.write_text(tomli_w.dumps(table), encoding="utf-8")
    assert [resumed(source) for source in (file, directory.path)] == [False, False]
    assert resumed(file, "resources.mps=true") is True


@pytest.mark.parametrize(
    ("overrides", "machine"),
    [
        ((LORA,), Machine(cores=4)),
        ((LORA, "trainer.device=cuda", "inference.device=cuda"), Machine(cores=4)),
        ((LORA, "inference.device=cpu"), WITH_GPU),
        ((LORA, "trainer.device=cpu", "inference.replicas=2"), WITH_GPU),
        ((LORA,), Machine(gpus=GPUS[:2], cores=16, memory_bytes=128 * GB)),
        ((LORA, "cluster.allow_join=true"), WITH_GPU),
        ((LORA, "inference.urls=['http://10.0.0.1:8000']"), WITH_GPU),
        ((LORA, "inference.engine=vllm", "inference.vllm.python='/usr/bin/python3'"), WITH_GPU),
        (
            (
                LORA,
                "resources.mps=false",
            ),
            WITH_GPU,
        ),
    ],
)
def test_without_a_trainer_and_an_embedded_policy_server_on_one_gpu_there_is_no_server_and_nothing_is_said(
    tmp_path: Path, overrides: tuple[str, ...], machine: Machine
) -> None:
    found = resolved(project(tmp_path, "1.5b"), *overrides, machine=machine)
    assert found.loaded.config.resources.mps is False
    assert "resources.mps" not in found.chosen
    assert mps_texts(found) == []


@pytest.mark.parametrize("setting", ["auto", "optional"])
def test_an_optional_server_is_left_out_where_it_cannot_be_used_also_in_a_resumed_run_and_the_table_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: str
) -> None:
    file = project(tmp_path, "1.5b")
    recorded = resolved(file, LORA).loaded.config
    with monkeypatch.context() as changed:
        changed.setenv("PATH", str(tmp_path / "empty"))
        for earlier in (None, recorded):
            found = resolved(file, LORA, f"resources.mps={setting}", recorded=earlier)
            assert found.loaded.config.resources.mps is False
            (line,) = mps_texts(found)
            assert line.startswith(
                "mps: off (trainer and policy servers take turns on the GPU), because nvidia-cuda-mps"
            )
            assert "Install it" in line
    with monkeypatch.context() as changed:
        changed.setattr(tempfile, "tempdir", f"/tmp/{'long' * 20}")
        (line,) = mps_texts(resolved(file, LORA, f"resources.mps={setting}"))
        assert "Set TMPDIR to a shorter directory" in line
    monkeypatch.setenv(mps.PIPES, str(tmp_path / "elsewhere"))
    found = resolved(file, LORA, f"resources.mps={setting}")
    assert found.loaded.config.resources.mps is False
    (line,) = mps_texts(found)
    assert "an MPS server of another program is configured" in line


def test_a_gpu_that_is_full_without_the_server_gets_none(tmp_path: Path) -> None:
    file = project(tmp_path, "1.5b")
    needed = resolved(file, LORA, "run.gpu_memory_gb=1", "resources.mps=false").plan
    assert needed is not None
    # The smallest plan, the part that stays free, and half of the context of a server.
    limit = (needed.total(gpu(0)) / GB + 0.05) / 0.96
    found = resolved(file, LORA, f"run.gpu_memory_gb={limit}")
    assert found.faults() == []
    assert found.loaded.config.resources.mps is False
    assert mps_texts(found) == [
        "mps: off (trainer and policy servers take turns on the GPU), because the GPU has no memory for its server"
    ]
    assert required(file, LORA, f"run.gpu_memory_gb={limit}").faults() != []


@pytest.mark.parametrize(
    ("count", "inherited", "seen"),
    [(1, None, None), (1, "0", "GPU-0abc"), (3, None, "GPU-1abc"), (3, "2,1", "GPU-1abc")],
)
def test_clients_see_their_gpus_by_identity_unless_there_is_only_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int, inherited: str | None, seen: str | None
) -> None:
    """The server counts the GPUs that it sees, so numbers would mean others for its clients."""
    monkeypatch.setattr(mps, "driver_gpus", lambda: GPUS[:count])
    monkeypatch.delenv(mps.DEVICES, raising=False)
    if inherited is not None:
        monkeypatch.setenv(mps.DEVICES, inherited)
    directory = RunDirectory(tmp_path)
    directory.write_manifest(name="run", source_dir=tmp_path)
    named = [] if count == 1 else ["resources.trainer_gpus=[1]", "resources.policy_gpus=[1]"]
    devices = ["trainer.device=cuda", "inference.device=cuda", "resources.mps=true"]
    lora = ["trainer.lora.rank=4", "resources.shared_base=true"]
    plan = plan_run(load_config(EXAMPLE / "run.toml", [*devices, *lora, *named]).config, directory)
    plan.close()
    starts = {start.name: start for start in plan.starts}
    clients = {"base", "policy", "trainer"}
    assert {name for name, start in starts.items() if mps.PIPES in start.environment} == clients
    assert {starts[name].environment.get("CUDA_VISIBLE_DEVICES") for name in clients} == {seen}
    assert {starts[name].environment[mps.PIPES] for name in clients} == {str(mps.mps_directory(directory))}
    lower = {name for name, start in starts.items() if start.environment.get(mps.PRIORITY) == mps.BELOW_NORMAL}
    assert lower == {"trainer"}, "decode steps do not wait for a training pass"
    assert {name: start.needs for name, start in starts.items() if start.needs} == {
        "base": ("mps",),
        "policy": ("mps", "base"),
        "trainer": ("mps", "base"),
    }
    assert list(starts)[:2] == ["mps", "base"], "servers are stopped in reverse"
    shutil.rmtree(mps.mps_directory(directory))
