"""Settings that a run file leaves open: chosen from the machine and the model, recorded, and kept by a resumed run."""

import json
from pathlib import Path
from typing import Any

import pytest

from rollbook.commands.checks import config as config_command
from rollbook.commands.checks import doctor
from rollbook.commands.training import train as train_module
from rollbook.commands.training.init import init_project
from rollbook.run.config.run import AUTO_SETTINGS, ConfigError, RunConfig, dump_toml, flat_values, load_config
from rollbook.run.config.sft import load_sft_config
from rollbook.run.resources.automatic import Resolution, resolve, trainer_choices, value_at
from rollbook.run.resources.machine import GB, Gpu, Machine, this_machine, visible
from rollbook.run.resources.memory_plan import gpu
from rollbook.run.supervision.plan import environment_of

H200 = Gpu(number=0, name="NVIDIA H200", memory_bytes=150 * GB)
WITH_GPU = Machine(gpus=(H200,), cores=16, memory_bytes=128 * GB)
WITHOUT_GPU = Machine(cores=16, memory_bytes=128 * GB)
SHAPES: dict[str, dict[str, Any]] = {
    "135m": {"hidden": 576, "layers": 30, "heads": 9, "kv_heads": 3, "ffn": 1536, "vocab": 49_152},
    "0.5b": {"hidden": 896, "layers": 24, "heads": 14, "kv_heads": 2, "ffn": 4864, "vocab": 151_936},
    "1.5b": {"hidden": 1536, "layers": 28, "heads": 12, "kv_heads": 2, "ffn": 8960, "vocab": 151_936},
    "8b": {"hidden": 4096, "layers": 36, "heads": 32, "kv_heads": 8, "ffn": 12_288, "vocab": 151_936},
}


def project(tmp_path: Path, model: str) -> Path:
    """The run file of a new project with a model of this shape, of which only the config exists."""
    home, shape = tmp_path / model, SHAPES[model]
    home.mkdir()
    table = {
        "hidden_size": shape["hidden"],
        "num_hidden_layers": shape["layers"],
        "num_attention_heads": shape["heads"],
        "num_key_value_heads": shape["kv_heads"],
        "intermediate_size": shape["ffn"],
        "vocab_size": shape["vocab"],
        "max_position_embeddings": 32_768,
        "tie_word_embeddings": model != "8b",
    }
    (home / "config.json").write_text(json.dumps(table), encoding="utf-8")
    init_project(tmp_path / f"run-{model}", template="single_turn", model=str(home))
    return tmp_path / f"run-{model}" / "run.toml"


def resolved(file: Path, *overrides: str, machine: Machine = WITH_GPU, recorded: RunConfig | None = None) -> Resolution:
    return resolve(load_config(file, overrides), machine, recorded=recorded)


def test_without_a_gpu_nothing_is_chosen(tmp_path: Path) -> None:
    file = project(tmp_path, "135m")
    found = resolved(file, machine=WITHOUT_GPU)
    assert found.chosen == {}
    assert found.loaded.config == load_config(file).config
    assert found.loaded.config.trainer.compute_dtype == found.loaded.config.inference.dtype == "float32"


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


def test_auto_in_the_file_means_the_same_as_no_setting(tmp_path: Path) -> None:
    file = project(tmp_path, "135m")
    written = resolved(file, *(f"{path}=auto" for path in AUTO_SETTINGS))
    assert written.loaded.config == resolved(file).loaded.config
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


def test_without_a_limit_no_process_is_limited(tmp_path: Path) -> None:
    config = resolved(project(tmp_path, "135m")).loaded.config
    assert (config.trainer.gpu_memory_gb, config.inference.gpu_memory_gb) == (None, None)


def test_a_run_that_does_not_fit_is_refused_with_settings_that_help(tmp_path: Path) -> None:
    (fault,) = resolved(project(tmp_path, "8b"), "run.gpu_memory_gb=80").faults()
    assert "of GPU 0, which has 76.8" in fault.message
    assert "optimizer" in fault.message
    assert "trainer.lora.rank = 16 saves 15" in fault.message
    assert resolved(tmp_path / "run-8b" / "run.toml", "run.gpu_memory_gb=80", "trainer.lora.rank=16").faults() == []


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
    assert found.loaded.config.trainer.ranks == 3


def test_gpus_are_divided_by_the_numbers_of_the_user(tmp_path: Path) -> None:
    file = project(tmp_path, "1.5b")
    counts = ["resources.gpus.trainer=6", "resources.gpus.policy=2"]
    config = resolved(file, *counts, machine=several(8)).loaded.config
    assert config.resources.trainer_gpus == (0, 1, 2, 3, 4, 5)
    assert config.resources.policy_gpus == (6, 7)
    assert (config.trainer.ranks, config.inference.replicas) == (6, 2)
    visible_gpus = [
        environment_of(config, name, role)["CUDA_VISIBLE_DEVICES"]
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


def test_supervised_fine_tuning_uses_the_gpu_unless_its_file_says_otherwise(tmp_path: Path) -> None:
    (tmp_path / "chats.jsonl").write_text("{}\n", encoding="utf-8")
    text = '[model]\npath = "m"\n[sft]\ndata = "chats.jsonl"\n[trainer]\nthreads = 2\ndevice = "auto"\n'
    (tmp_path / "sft.toml").write_text(text, encoding="utf-8")
    loaded = load_sft_config(tmp_path / "sft.toml")
    chosen = loaded.with_trainer(trainer_choices(loaded.config.trainer, WITH_GPU))
    assert (chosen.config.trainer.device, chosen.config.trainer.compute_dtype) == ("cuda", "bfloat16")
    assert chosen.table["trainer"] == {"threads": 2, "device": "cuda", "compute_dtype": "bfloat16"}
    assert loaded.with_trainer(trainer_choices(loaded.config.trainer, WITHOUT_GPU)).config == loaded.config
    on_cpu = load_sft_config(tmp_path / "sft.toml", ["trainer.device=cpu"]).config.trainer
    assert trainer_choices(on_cpu, WITH_GPU) == {}
