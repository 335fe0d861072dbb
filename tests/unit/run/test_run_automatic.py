"""Settings that a run file leaves open: chosen from the machine and the model, recorded, and kept by a resumed run."""

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rollbook.commands.checks import config as config_command
from rollbook.commands.checks import doctor
from rollbook.commands.output import stderr_console
from rollbook.commands.training import train as train_module
from rollbook.commands.training.init import init_project
from rollbook.run.config.run import AUTO_SETTINGS, ConfigError, RunConfig, dump_toml, load_config
from rollbook.run.config.source import flat_values
from rollbook.run.directory import RunDirectory
from rollbook.run.ledger_clients import model_limits
from rollbook.run.resources.automatic import Resolution, free_disk_bytes, resolve, value_at
from rollbook.run.resources.division import Division, estimated_step_s
from rollbook.run.resources.machine import GB, Gpu, Machine, this_machine, visible
from rollbook.run.resources.memory_plan import ALL_LAYERS, DISK, MAIN_MEMORY, gpu, memory_plan
from rollbook.run.resources.run_sizes import sizes_of
from rollbook.run.supervision.plan import environment_of
from rollbook.trainer.config import TrainerConfig
from tests.parts.run.projects import SHAPES, project

H200 = Gpu(number=0, name="NVIDIA H200", memory_bytes=150 * GB)
WITH_GPU = Machine(gpus=(H200,), cores=16, memory_bytes=128 * GB)
WITHOUT_GPU = Machine(cores=16, memory_bytes=128 * GB)


def resolved(file: Path, *overrides: str, machine: Machine = WITH_GPU, recorded: RunConfig | None = None) -> Resolution:
    return resolve(load_config(file, overrides), machine, recorded=recorded)


def test_without_a_gpu_nothing_is_chosen(tmp_path: Path) -> None:
    file = project(tmp_path, "135m")
    found = resolved(file, machine=WITHOUT_GPU)
    assert found.chosen == {}
    assert found.loaded.config == load_config(file).config
    assert found.loaded.config.trainer.compute_dtype == found.loaded.config.inference.dtype == "float32"


def test_without_a_gpu_passes_are_smaller_only_if_main_memory_requires_it(tmp_path: Path) -> None:
    file = project(tmp_path, "135m")
    longer = "rollout.max_total_tokens=2048"

    def chosen(memory_gb: int, *overrides: str) -> dict[str, object]:
        machine = Machine(cores=2, memory_bytes=memory_gb * GB)
        found = resolved(file, longer, *overrides, machine=machine)
        assert found.faults() == []
        assert all(
            str(passes) in found.lines()[0].replace(",", "") for passes in found.chosen.values() if passes is not True
        )
        return dict(found.chosen)

    assert chosen(64) == {}
    assert chosen(25) == {"trainer.max_tokens_per_microbatch": 8192}
    assert chosen(14) == {"trainer.max_tokens_per_microbatch": 2048}
    assert chosen(11)["trainer.gradient_checkpointing"] is True
    assert chosen(25, "trainer.max_tokens_per_microbatch=16384") == {"trainer.gradient_checkpointing": True}
    fixed = ("trainer.max_tokens_per_microbatch=16384", "trainer.gradient_checkpointing=false")
    (fault,) = resolved(file, longer, *fixed, machine=Machine(cores=2, memory_bytes=25 * GB)).faults()
    assert "trainer.max_tokens_per_microbatch = 4096 saves" in fault.message
    assert "rollout.max_total_tokens" not in fault.message, "passes of this size are filled by shorter sequences too"


def test_a_pass_is_planned_no_larger_than_a_step(tmp_path: Path) -> None:
    file = project(tmp_path, "135m")
    small = ("gate.groups_per_step=2", "rollout.completions_per_prompt=4", "rollout.max_total_tokens=256")
    found = resolved(file, *small, machine=Machine(cores=2, memory_bytes=16 * GB))
    assert found.sizes.tokens_per_pass == 2 * 4 * 256
    assert found.chosen == {}
    assert found.faults() == []


def test_a_disk_that_is_too_small_is_reported_in_units_that_say_something(tmp_path: Path) -> None:
    found = resolve(load_config(project(tmp_path, "135m")), WITHOUT_GPU, disk_bytes=2_000_000)
    (fault,) = found.faults()
    assert " GB of disk, which has 1.9 MB; " in fault.message or " GB of disk, which has 2.0 MB; " in fault.message
    assert free_disk_bytes(Path("/proc/no/such")) is None


def test_with_a_gpu_the_run_file_of_init_gets_the_fast_settings(tmp_path: Path) -> None:
    config = resolved(project(tmp_path, "1.5b")).loaded.config
    assert (config.trainer.device, config.trainer.compute_dtype, config.trainer.threads) == ("cuda", "bfloat16", 4)
    assert (config.inference.device, config.inference.dtype) == ("cuda", "bfloat16")
    assert (config.inference.transfer, config.inference.capture_steps) == ("cuda_ipc", True)
    assert config.rollout.workers == 8
    assert config.inference.max_running == config.gate.max_groups_in_flight * config.rollout.completions_per_prompt
    assert config.inference.max_model_len == config.rollout.max_total_tokens + 16
    assert isinstance(config.inference.kv_memory_mb, float)
    assert config.trainer.max_tokens_per_microbatch is not None
    assert config.trainer.max_tokens_per_microbatch > 8192
    assert not config.trainer.gradient_checkpointing


def test_with_eight_bits_the_same_requests_take_half_the_cache(tmp_path: Path) -> None:
    file = project(tmp_path, "1.5b")

    def cache(kv_dtype: str, *more: str) -> Any:
        found = resolved(file, "inference.exactness=fast", f"inference.kv_dtype={kv_dtype}", *more)
        return found.loaded.config.inference.kv_memory_mb

    # Heads of 128, and an exponent of a byte for each of them.
    assert cache("fp8") / cache("auto") == pytest.approx(129 / 256, rel=0.01)
    assert cache("fp8", "inference.dtype=float32") == cache("fp8")


def test_the_copies_of_fp8_weights_are_planned_and_shown(tmp_path: Path) -> None:
    found = resolved(project(tmp_path, "1.5b"), "inference.exactness=fast", "inference.weights_dtype=fp8")
    assert found.plan is not None
    copies = next(part for part in found.plan.parts if part.what == "8-bit weights")
    # A byte for each parameter of the layers' matrices.
    assert copies.num_bytes == pytest.approx(1.31e9, rel=0.01)
    assert any("bfloat16 with fp8 weights" in line for line in found.lines())


@pytest.mark.parametrize(
    "override",
    [
        "trainer.device=cpu",
        "trainer.compute_dtype=float32",
        "trainer.threads=2",
        "trainer.max_tokens_per_microbatch=1234",
        "trainer.max_logits_mb=77",
        "trainer.gradient_checkpointing=true",
        "inference.device=cpu",
        "inference.dtype=float16",
        "inference.max_running=17",
        "inference.max_model_len=700",
        "inference.kv_memory_mb=999.0",
        "inference.transfer=directory",
        "inference.threads=3",
        "inference.capture_steps=false",
        "rollout.workers=3",
    ],
)
def test_a_setting_of_the_user_is_kept(tmp_path: Path, override: str) -> None:
    file, (path, _, value) = project(tmp_path, "135m"), override.partition("=")
    assert path in AUTO_SETTINGS
    found = resolved(file, override)
    assert str(value_at(found.loaded.config, path)).lower() == value
    assert path not in found.chosen


CODING_AGENT = (
    'rollout.function="agent"',
    'rollout.settings={agent="pi", reward="rewards:correct"}',
    "rollout.completions_per_prompt=4",
)


@pytest.mark.parametrize(
    ("cores", "overrides", "at_once", "groups"),
    [
        (2, ("gate.max_groups_in_flight=auto",), 8, 4),
        (1, ("gate.max_groups_in_flight=auto", "rollout.completions_per_prompt=16"), 4, 2),
        (12, ("gate.max_groups_in_flight=auto",), 48, 16),
        (16, ("gate.max_groups_in_flight=auto",), None, 16),
        (2, ("gate.max_groups_in_flight=9",), None, 9),
        (2, ("gate.max_groups_in_flight=auto", "sandbox.at_once=3"), 3, 16),
    ],
)
def test_coding_agents_start_at_most_a_few_for_each_core(
    tmp_path: Path, cores: int, overrides: tuple[str, ...], at_once: int | None, groups: int
) -> None:
    machine = Machine(cores=cores, memory_bytes=128 * GB)
    found = resolved(project(tmp_path, "135m"), *CODING_AGENT, *overrides, machine=machine)
    config = found.loaded.config
    assert (config.sandbox.at_once, config.gate.max_groups_in_flight) == (at_once, groups)
    assert any("sandbox.at_once" in line for line in found.lines()) == ("sandbox.at_once" in found.chosen)


def test_auto_in_the_file_means_the_same_as_no_setting(tmp_path: Path) -> None:
    file = project(tmp_path, "135m")
    written = resolved(file, *(f"{path}=auto" for path in AUTO_SETTINGS))
    # The file of the project sets this one.
    assert written.loaded.config == resolved(file, "gate.max_groups_in_flight=auto").loaded.config
    assert written.chosen


def test_what_was_chosen_is_written_to_the_config_and_read_back(tmp_path: Path) -> None:
    file = project(tmp_path, "135m")
    first = resolved(file)
    (tmp_path / "run-135m" / "again.toml").write_text(dump_toml(first.loaded.config), encoding="utf-8")
    again = load_config(tmp_path / "run-135m" / "again.toml").config
    assert flat_values(again) == flat_values(first.loaded.config)


def test_a_resumed_run_keeps_the_choices_of_its_first_machine(tmp_path: Path) -> None:
    file = project(tmp_path, "1.5b")
    small = Machine(gpus=(Gpu(number=0, name="L40S", memory_bytes=48 * GB),), cores=4, memory_bytes=64 * GB)
    recorded = resolved(file, machine=small).loaded.config
    resumed = resolved(file, machine=WITH_GPU, recorded=recorded)
    assert resumed.loaded.config == recorded
    assert resolved(file, machine=WITH_GPU).loaded.config != recorded


def test_a_run_that_began_on_a_gpu_is_not_silently_resumed_on_a_cpu(tmp_path: Path) -> None:
    file = project(tmp_path, "135m")
    resumed = resolved(file, machine=WITHOUT_GPU, recorded=resolved(file).loaded.config)
    assert [fault.path for fault in resumed.faults()] == ["trainer.device", "inference.device"]
    assert "The run began on a machine with a GPU" in str(resumed.faults()[0])


def test_a_device_that_the_machine_does_not_have_is_refused(tmp_path: Path) -> None:
    faults = resolved(project(tmp_path, "135m"), "trainer.device=cuda", machine=WITHOUT_GPU).faults()
    assert [fault.path for fault in faults] == ["trainer.device"]
    assert "no NVIDIA GPU" in faults[0].message


def test_an_interpreter_of_vllm_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    vllm = ("inference.engine=vllm", f"inference.vllm.python={tmp_path}/bin/python")
    faults = resolved(project(tmp_path, "135m"), *vllm).faults()
    assert [str(fault).partition(". ")[0] for fault in faults] == [
        f"inference.vllm.python: {tmp_path}/bin/python does not exist"
    ]
    assert not resolved(tmp_path / "run-135m" / "run.toml", vllm[0], "inference.vllm.python=python3").faults()


def test_config_check_accepts_a_run_file_for_another_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(config_command, "this_machine", lambda: WITHOUT_GPU)
    config_command.check_command(project(tmp_path, "135m"), ["trainer.device=cuda"], preflight=False)
    printed = capsys.readouterr()
    assert 'device = "cuda"' in printed.out
    assert "this machine has no NVIDIA GPU" in " ".join(printed.err.split())


def test_an_external_trainer_keeps_its_own_settings(tmp_path: Path) -> None:
    found = resolve(load_config(project(tmp_path, "1.5b")), WITH_GPU, has_trainer=False)
    assert found.loaded.config.trainer == load_config(tmp_path / "run-1.5b" / "run.toml").config.trainer
    assert (found.loaded.config.inference.device, found.loaded.config.inference.dtype) == ("cuda", "bfloat16")
    assert found.loaded.config.inference.kv_memory_mb == "auto"
    assert found.plan is None


@pytest.mark.parametrize(
    ("overrides", "machine", "reason"),
    [
        (["trainer.device=cpu", "inference.device=cpu"], WITH_GPU, "trainer.device and inference.device are 'cpu'"),
        ([], Machine(unusable_gpus=(H200,), unusable_because="torch is a build for CPUs"), "a build for CPUs"),
        (
            ["trainer.ranks=1"],
            Machine(gpus=(H200, Gpu(number=1, name="T4", memory_bytes=16 * GB))),
            "GPU 1: T4, 16 GB: not used",
        ),
    ],
)
def test_a_gpu_that_is_not_used_is_named_with_the_reason(
    tmp_path: Path, overrides: list[str], machine: Machine, reason: str
) -> None:
    assert reason in "\n".join(resolved(project(tmp_path, "135m"), *overrides, machine=machine).lines())


def test_a_tiny_model_stays_on_the_cpu_and_says_so(tmp_path: Path) -> None:
    init_project(tmp_path / "tiny", template="single_turn", model=None)
    found = resolved(tmp_path / "tiny" / "run.toml")
    assert found.chosen == {}
    assert "0.1 million parameters are not faster on it" in "\n".join(found.lines())


def test_a_gpu_without_bfloat16_computes_in_float32(tmp_path: Path) -> None:
    old = Machine(gpus=(Gpu(number=0, name="V100", memory_bytes=32 * GB, capability=7),), cores=8, memory_bytes=64 * GB)
    config = resolved(project(tmp_path, "135m"), machine=old).loaded.config
    assert (config.trainer.compute_dtype, config.inference.dtype) == ("float32", "float32")


@pytest.mark.parametrize(
    ("model", "limit", "lora"), [("0.5b", 24, False), ("1.5b", 48, False), ("8b", 48, True), ("8b", 80, True)]
)
def test_runs_of_the_sizes_that_users_have_fit(tmp_path: Path, model: str, limit: int, lora: bool) -> None:
    overrides = [f"run.gpu_memory_gb={limit}", *(["trainer.lora.rank=16"] if lora else [])]
    found = resolved(project(tmp_path, model), *overrides)
    assert found.faults() == []
    assert found.plan is not None
    assert found.plan.total(gpu(0)) <= limit * GB
    trainer, policy = found.loaded.config.trainer.gpu_memory_gb, found.loaded.config.inference.gpu_memory_gb
    assert trainer is not None
    assert policy is not None
    assert trainer + policy <= limit


def test_only_as_many_layers_are_recomputed_as_needed_and_the_number_is_recorded(tmp_path: Path) -> None:
    file = project(tmp_path, "1.5b")
    found = resolved(file, "run.gpu_memory_gb=46")
    number = found.loaded.config.trainer.gradient_checkpointing
    assert number is not True
    assert 0 < number < SHAPES["1.5b"]["layers"]
    assert f"gradient checkpointing of {number} layer" in "\n".join(found.lines())
    (file.parent / "again.toml").write_text(dump_toml(found.loaded.config), encoding="utf-8")
    assert load_config(file.parent / "again.toml").config.trainer.gradient_checkpointing == number
    everything = resolved(file, "run.gpu_memory_gb=40").loaded.config.trainer.gradient_checkpointing
    assert everything is True


@pytest.mark.parametrize(("written", "read"), [("true", True), ("false", False), ("0", 0), ("1", 1), ("12", 12)])
def test_a_number_of_recomputed_layers_is_not_a_switch(tmp_path: Path, written: str, read: bool | int) -> None:
    config = load_config(project(tmp_path, "135m"), [f"trainer.gradient_checkpointing={written}"]).config
    found = config.trainer.gradient_checkpointing
    assert (found, type(found)) == (read, type(read))
    assert TrainerConfig.model_validate(config.trainer.model_dump(mode="json")).gradient_checkpointing is found


def test_a_negative_number_of_recomputed_layers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"trainer\.gradient_checkpointing"):
        load_config(project(tmp_path, "135m"), ["trainer.gradient_checkpointing=-1"])


def test_without_a_limit_no_process_is_limited(tmp_path: Path) -> None:
    config = resolved(project(tmp_path, "135m")).loaded.config
    assert (config.trainer.gpu_memory_gb, config.inference.gpu_memory_gb) == (None, None)


def test_a_run_that_does_not_fit_is_refused_with_settings_that_help(tmp_path: Path) -> None:
    fault = resolved(project(tmp_path, "8b"), "run.gpu_memory_gb=80").faults()[0]
    assert "of GPU 0, which has 76.8" in fault.message
    assert "optimizer" in fault.message
    assert "trainer.lora.rank = 16 saves 15" in fault.message
    assert resolved(tmp_path / "run-8b" / "run.toml", "run.gpu_memory_gb=80", "trainer.lora.rank=16").faults() == []


@pytest.mark.parametrize(("kind", "on_gpu", "in_main_memory"), [("host", 0, 8), ("8bit", 2, 0)])
def test_a_state_of_the_optimizer_in_another_form_is_planned_and_suggested(
    tmp_path: Path, kind: str, on_gpu: int, in_main_memory: int
) -> None:
    file = project(tmp_path, "1.5b")
    (fault,) = resolved(file, "run.gpu_memory_gb=36").faults()
    assert f'trainer.optimizer_state = "{kind}" saves' in fault.message
    found = resolved(file, "run.gpu_memory_gb=36", f"trainer.optimizer_state={kind}")
    assert found.plan is not None
    assert found.model is not None

    def bytes_at(place: str) -> int:
        assert found.plan is not None
        return sum(part.num_bytes for part in found.plan.parts if (part.place, part.what) == (place, "optimizer"))

    assert bytes_at(gpu(0)) == pytest.approx(on_gpu * found.model.parameters, rel=0.02)
    assert bytes_at(MAIN_MEMORY) == in_main_memory * found.model.parameters
    assert found.faults() == []


def test_train_refuses_before_it_creates_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_module, "this_machine", lambda: WITH_GPU)
    file = project(tmp_path, "8b")
    with pytest.raises(ConfigError, match="GB are missing"):
        train_module.train(file, run_dir=tmp_path / "run", overrides=["run.gpu_memory_gb=24"])
    assert not (tmp_path / "run").exists()


def test_the_doctor_prints_the_plan_of_a_run_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "this_machine", lambda: WITH_GPU)
    monkeypatch.setattr(doctor, "free_disk_bytes", lambda _: 1000 * GB)
    file = project(tmp_path, "1.5b")
    assert doctor.doctor_command(file, directory=tmp_path) == 0
    printed = capsys.readouterr().out
    for text in ("GPU 0: ", "main memory: ", "disk: ", "master weights", "keys and values", "context"):
        assert text in printed
    assert doctor.doctor_command(file, ["run.gpu_memory_gb=8"], directory=tmp_path) == 1
    assert "GB are missing" in capsys.readouterr().out


def test_visible_devices_are_counted_as_cuda_counts_them() -> None:
    gpus = [Gpu(number=n, name=f"gpu{n}", memory_bytes=GB, uuid=f"GPU-{n}abc") for n in range(3)]

    def names(value: str | None) -> list[tuple[int, str]]:
        return [(found.number, found.name) for found in visible(gpus, value)]

    assert names(None) == [(0, "gpu0"), (1, "gpu1"), (2, "gpu2")]
    assert names("2,0") == [(0, "gpu2"), (1, "gpu0")]
    assert names("GPU-1a") == [(0, "gpu1")]
    assert names("") == names("-1") == []
    assert names("1,7,2") == [(0, "gpu1")]


def test_this_machine_has_cores_and_memory() -> None:
    assert this_machine().cores >= 1
    assert this_machine().memory_bytes > GB


def several(count: int, size_gb: int = 85) -> Machine:
    gpus = tuple(Gpu(number=number, name="H100", memory_bytes=size_gb * GB) for number in range(count))
    return Machine(gpus=gpus, cores=64, memory_bytes=1000 * GB)


VLLM = ["inference.engine=vllm", "inference.vllm.python=python3"]


@pytest.mark.parametrize("count", [2, 4, 8])
@pytest.mark.parametrize("engine", [[], VLLM])
def test_several_gpus_are_divided_between_trainer_and_policy(tmp_path: Path, count: int, engine: list[str]) -> None:
    found = resolved(project(tmp_path, "1.5b"), *engine, machine=several(count))
    config = found.loaded.config
    assert found.faults() == []
    assert (*config.resources.trainer_gpus, *config.resources.policy_gpus) == tuple(range(count))
    assert config.trainer.ranks == len(config.resources.trainer_gpus)
    assert len(config.resources.policy_gpus) % config.inference.replicas == 0
    assert config.inference.transfer != "cuda_ipc"
    printed = "\n".join(found.lines())
    assert "by estimate the fastest division" in printed
    assert "not used" not in printed


def test_a_model_that_needs_several_gpus_gets_enough_ranks(tmp_path: Path) -> None:
    found = resolved(project(tmp_path, "8b"), machine=several(4))
    assert found.faults() == []
    assert found.loaded.config.trainer.ranks == 2


def test_gpus_are_divided_by_the_numbers_of_the_user(tmp_path: Path) -> None:
    file = project(tmp_path, "1.5b")
    counts = ["resources.gpus.trainer=6", "resources.gpus.policy=2"]
    config = resolved(file, *counts, machine=several(8)).loaded.config
    assert config.resources.trainer_gpus == (0, 1, 2, 3, 4, 5)
    assert config.resources.policy_gpus == (6, 7)
    assert (config.trainer.ranks, config.inference.replicas) == (6, 2)
    visible_gpus = [
        environment_of(config, RunDirectory(tmp_path), name, role)["CUDA_VISIBLE_DEVICES"]
        for name, role in (("trainer", "trainer"), ("policy", "policy"), ("policy-1", "policy"))
    ]
    assert visible_gpus == ["0,1,2,3,4,5", "6", "7"]
    (file.parent / "again.toml").write_text(dump_toml(config), encoding="utf-8")
    assert flat_values(load_config(file.parent / "again.toml").config) == flat_values(config)


def test_more_gpus_than_the_machine_has_are_refused(tmp_path: Path) -> None:
    counts = ["resources.gpus.trainer=2", "resources.gpus.policy=1"]
    found = resolved(project(tmp_path, "1.5b"), *counts, machine=several(2))
    assert "GPU 2 is used, but this machine has 2" in str(found.faults()[0])


def test_counts_and_numbers_of_gpus_exclude_each_other(tmp_path: Path) -> None:
    overrides = ["resources.gpus.trainer=1", "resources.gpus.policy=1", "resources.trainer_gpus=[1]"]
    with pytest.raises(ConfigError, match="exclude each other"):
        load_config(project(tmp_path, "1.5b"), overrides)


def test_named_gpus_are_not_divided_again(tmp_path: Path) -> None:
    named = ["resources.trainer_gpus=[3]", "resources.policy_gpus=[1]"]
    config = resolved(project(tmp_path, "1.5b"), *named, machine=several(4)).loaded.config
    assert (config.resources.trainer_gpus, config.resources.policy_gpus) == ((3,), (1,))
    assert (config.trainer.ranks, config.inference.replicas) == (1, 1)


def mixture(tmp_path: Path) -> Path:
    """The run file of a project with a model of the shape of Qwen3-30B-A3B, of which only the config exists."""
    file = project(tmp_path, "8b")
    config = tmp_path / "8b" / "config.json"
    table = json.loads(config.read_text(encoding="utf-8")) | {
        "hidden_size": 2048,
        "num_hidden_layers": 48,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
    }
    config.write_text(json.dumps(table), encoding="utf-8")
    return file


def test_router_replay_is_refused_with_the_arithmetic_if_a_group_does_not_fit_into_a_request(tmp_path: Path) -> None:
    file = mixture(tmp_path)
    sizes = ("rollout.max_total_tokens=32768", "rollout.completions_per_prompt=64", "trainer.router_replay=true")
    assert load_config(file, sizes).config.inference.record_routes
    faults = [f for f in resolved(file, *sizes, "trainer.lora.rank=8").faults() if f.path == "trainer.router_replay"]
    assert len(faults) == 1
    for part in (
        "64 samples × 32,768 tokens × 392 bytes (48 layers × 8 experts = 384, and 8 of the token) = 822 MB",
        "ledger.max_body_mb = 256",
        "Set ledger.max_body_mb = 823",
        "rollout.max_total_tokens = 10204",
    ):
        assert part in faults[0].message
    enough = (*sizes, "ledger.max_body_mb=823", "ledger.max_receiving_mb=4000")
    assert not [f for f in resolved(file, *enough).faults() if f.path == "trainer.router_replay"]
    assert not [f for f in resolved(file, *sizes[:2]).faults() if f.path == "trainer.router_replay"]


def test_the_longest_trained_sequence_is_what_the_memory_plan_has_room_for(tmp_path: Path) -> None:
    file = project(tmp_path, "8b")
    config = tmp_path / "8b" / "config.json"
    table = json.loads(config.read_text(encoding="utf-8")) | {"max_position_embeddings": 1_000_000}
    config.write_text(json.dumps(table), encoding="utf-8")
    found = resolved(file, "trainer.lora.rank=8", "rollout.max_total_tokens=8192")
    longest = found.loaded.config.trainer.max_sequence_tokens
    assert longest is not None
    assert 8192 < longest < 1_000_000
    assert found.model is not None
    for tokens, is_fitting in ((longest, True), (longest + 1, False)):
        alone = replace(found.sizes, longest=tokens, tokens_per_pass=tokens, checkpointed_layers=ALL_LAYERS)
        assert (gpu(0) not in memory_plan(found.model, alone).overfull(found.capacity)) is is_fitting
    # It is recorded: a run that is resumed with another memory has the same limit.
    smaller = Machine(gpus=(replace(H200, memory_bytes=100 * GB),), cores=16, memory_bytes=128 * GB)
    again = resolved(file, "trainer.lora.rank=8", machine=smaller, recorded=found.loaded.config)
    assert again.loaded.config.trainer.max_sequence_tokens == longest
    limits = model_limits(tmp_path / "8b", needs_logprobs=True, most=longest)
    assert limits.max_tokens == longest
    assert model_limits(tmp_path / "8b", needs_logprobs=True).max_tokens == 1_000_000
    # A model whose context fits needs no limit.
    assert resolved(project(tmp_path, "135m")).loaded.config.trainer.max_sequence_tokens is None


@pytest.mark.parametrize(
    ("model", "overrides", "transfer", "copy"),
    [
        ("1.5b", [], "cuda_ipc", "gpu"),
        ("1.5b", ["run.gpu_memory_gb=60"], "cuda_ipc", "main_memory"),
        ("1.5b", ["run.gpu_memory_gb=48"], "shared_memory", "main_memory"),
        ("1.5b", ["run.gpu_memory_gb=48", "inference.transfer=cuda_ipc"], "cuda_ipc", "main_memory"),
        ("1.5b", ["trainer.checkpoint_copy=main_memory"], "cuda_ipc", "main_memory"),
        ("8b", ["trainer.lora.rank=16", "inference.forward_tokens=9000"], "cuda_ipc", "gpu"),
        ("8b", ["trainer.lora.rank=16", "inference.publish=full"], "shared_memory", "gpu"),
    ],
)
def test_what_the_run_will_do_is_what_was_planned(
    tmp_path: Path, model: str, overrides: list[str], transfer: str, copy: str
) -> None:
    found = resolved(project(tmp_path, model), *overrides)
    config = found.loaded.config
    assert (config.inference.transfer, config.trainer.checkpoint_copy) == (transfer, copy)
    assert found.model is not None
    assert memory_plan(found.model, sizes_of(config, WITH_GPU)) == found.plan


def planned(found: Resolution, place: str, process: str, what: str) -> int:
    assert found.plan is not None
    wanted = (place, process, what)
    return sum(part.num_bytes for part in found.plan.parts if (part.place, part.process, part.what) == wanted)


def test_merged_adapters_are_planned_as_float32_copies_of_the_whole_model(tmp_path: Path) -> None:
    found = resolved(project(tmp_path, "0.5b"), "trainer.lora.rank=16", "inference.publish=full")
    assert found.model is not None
    assert found.loaded.config.inference.transfer == "cuda_ipc"
    assert planned(found, gpu(0), "trainer", "published copies") == 3 * 4 * found.model.parameters
    assert planned(found, gpu(0), "policy", "new weights") == 2 * found.model.parameters


def test_several_ranks_are_planned_with_float32_weights_and_no_second_copy(tmp_path: Path) -> None:
    counts = ["resources.gpus.trainer=2", "resources.gpus.policy=1", "trainer.kl_coef=0.1"]
    full = resolved(project(tmp_path, "1.5b"), *counts, machine=several(3))
    assert full.model is not None
    parameters = full.model.parameters
    for rank in ("trainer", "rank 1"):
        place = gpu(0 if rank == "trainer" else 1)
        assert planned(full, place, rank, "weights") == 0
        assert planned(full, place, rank, "master weights") == 2 * parameters
        assert planned(full, place, rank, "reference") == 2 * parameters
    lora = resolved(tmp_path / "run-1.5b" / "run.toml", *counts, "trainer.lora.rank=8", machine=several(3))
    assert planned(lora, gpu(1), "rank 1", "weights") == 2 * parameters


def test_only_the_precision_of_gpus_that_the_run_uses_matters(tmp_path: Path) -> None:
    old = Gpu(number=1, name="V100", memory_bytes=32 * GB, capability=7)
    both, file = Machine(gpus=(H200, old), cores=8, memory_bytes=64 * GB), project(tmp_path, "135m")
    one = resolved(file, "trainer.ranks=1", machine=both).loaded.config
    assert (one.trainer.compute_dtype, one.inference.dtype) == ("bfloat16", "bfloat16")
    divided = resolved(file, machine=both).loaded.config
    assert (divided.trainer.compute_dtype, divided.inference.dtype) == ("float32", "float32")
    counted = ["resources.gpus.trainer=1", "resources.gpus.policy=1"]
    three = replace(both, gpus=(H200, replace(H200, number=1), replace(old, number=2)))
    assert resolved(file, *counted, machine=three).loaded.config.trainer.compute_dtype == "bfloat16"


def test_a_mixture_of_experts_is_estimated_by_the_experts_that_a_token_uses(tmp_path: Path) -> None:
    found = resolved(mixture(tmp_path), "trainer.lora.rank=8")
    assert found.model is not None
    # 48 layers of 120 experts that a token does not use, of three matrices each.
    assert found.model.parameters - found.model.active_parameters == 48 * 120 * 3 * 2048 * 768
    division = Division(trainer_gpus=(0,), policy_gpus=(1,), replicas=1)
    dense = replace(found.model, experts=0, experts_per_token=0, expert_layers=0)
    config = found.loaded.config
    assert estimated_step_s(found.model, config, division) < estimated_step_s(dense, config, division) / 2


def test_checkpoints_of_a_run_that_is_resumed_are_not_counted_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train_module, "this_machine", lambda: WITH_GPU)
    file, directory = project(tmp_path, "0.5b"), RunDirectory(tmp_path / "run")
    found = resolved(file)
    assert found.plan is not None
    needed, state = found.plan.total(DISK), found.plan.total(DISK) // 3
    for step in (10, 20, 30):  # the first one is no longer kept
        folder = directory.checkpoints / f"step-{step:06d}" / "model"
        folder.mkdir(parents=True)
        with (folder / "model.safetensors").open("wb") as weights:
            weights.truncate(state)
    (directory.path / "config.toml").write_text(dump_toml(found.loaded.config), encoding="utf-8")
    monkeypatch.setattr(train_module, "load_resolved_config", lambda _: found.loaded)
    monkeypatch.setattr(RunDirectory, "exists", True)
    for free, is_accepted in ((needed - 2 * state, True), (needed - 2 * state - GB, False)):
        monkeypatch.setattr(train_module, "free_disk_bytes", lambda _, free=free: free)
        with nullcontext() if is_accepted else pytest.raises(ConfigError, match="of disk"):
            train_module.fitted_run(load_config(file), directory, [], stderr_console())
