"""`rollbook sft`: it learns, resumes bit for bit, and writes a model that transformers can load."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tomli_w
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from rollbook.commands.training.sft import run_sft
from rollbook.contracts.errors import RunError
from rollbook.contracts.group import GroupId
from rollbook.rollout.chat.demonstrations import read_demonstrations
from rollbook.rollout.chat.tokenizer import ModelTokenizer
from rollbook.run.config.run import ConfigError
from rollbook.run.config.sft import load_sft_config
from rollbook.run.directory import RunDirectory
from rollbook.run.processes.sft import write_or_check_manifest
from rollbook.run.reader import open_run
from rollbook.telemetry.events import EventLog
from rollbook.telemetry.metrics import MetricRecorder, read_metrics
from rollbook.trainer.config import TrainerConfig
from rollbook.trainer.model.model_directory import prepare_model_directory
from rollbook.trainer.sft import SFT_METRICS, SftLoop, SftOutcome, numbers_of_step, steps_of
from rollbook.trainer.sft_config import READ_BY_SFT, SftConfig
from tests.parts.run.small import REPOSITORY, SmallRun, rollbook

WORDS = [str(n) for n in range(10)]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %} {{ m.content }}{% if m.role == 'assistant' %} <eos>{% endif %}{% endfor %} "
)
CONFIG = f"""
[run]
seed = 5
[model.build]
hidden_size = 16
layers = 1
heads = 2
kv_heads = 2
intermediate_size = 24
max_position_embeddings = 32
vocabulary = {json.dumps(WORDS)}
chat_template = "{TEMPLATE}"
[sft]
data = "demos.jsonl"
validation_share = 0.2
examples_per_step = 8
epochs = 10
evaluate_every = 20
[trainer]
lr = 3e-2
schedule = "cosine"
checkpoint_every = 10
"""


def demonstrations(path: Path, count: int = 100) -> None:
    """Write demonstrations whose answer is the second word of the question."""
    rng = random.Random(1)
    with path.open("w", encoding="utf-8") as file:
        for _ in range(count):
            words = rng.choices(WORDS, k=3)
            messages = [{"role": "user", "content": " ".join(words)}, {"role": "assistant", "content": words[1]}]
            file.write(json.dumps({"messages": messages}) + "\n")


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "sft.toml").write_text(CONFIG, encoding="utf-8")
    demonstrations(tmp_path / "demos.jsonl")
    return tmp_path


def train_in_process(home: Path) -> SftOutcome:
    """The same training without the command line."""
    loaded = load_sft_config(home / "sft.toml")
    model_dir = prepare_model_directory(loaded.model, home / "uninterrupted" / "model", seed=loaded.config.run.seed)
    found = read_demonstrations(
        home / "demos.jsonl", ModelTokenizer.from_directory(model_dir), max_tokens=99, is_strict=True
    )
    train, validation = found.split(0.2)
    return SftLoop(
        config=loaded.config.sft,
        trainer=loaded.config.trainer,
        model_dir=model_dir,
        directory=home / "uninterrupted",
        demonstrations=train,
        validation=validation,
        metrics=MetricRecorder("sft", SFT_METRICS, home / "uninterrupted" / "metrics.jsonl"),
        log=EventLog("sft"),
    ).run()


@pytest.mark.slow
def test_sft_learns_and_a_killed_run_ends_with_the_same_weights(home: Path) -> None:
    uninterrupted = train_in_process(home)
    assert uninterrupted.eval_loss is not None
    assert uninterrupted.eval_loss_before is not None
    assert uninterrupted.eval_loss < 0.6 * uninterrupted.eval_loss_before
    rows = read_metrics(home / "uninterrupted" / "metrics.jsonl", process="sft")
    assert rows[-1]["step"] == uninterrupted.steps
    assert [row["step"] for row in rows if row["eval/loss"] is not None][-1] == uninterrupted.steps

    command = [sys.executable, "-m", "rollbook", "sft", str(home / "sft.toml"), "--out", str(home / "killed")]
    child = subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    metrics = home / "killed" / "metrics.jsonl"
    until = time.monotonic() + 120
    while len(read_metrics(metrics)) < 14 and child.poll() is None and time.monotonic() < until:
        time.sleep(0.01)
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    while (done := rollbook("sft", str(home / "killed"))).returncode and "is in use" in done.stderr:
        time.sleep(0.5)  # the child of the killed command exits a moment later
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["digest"] == uninterrupted.checkpoint.weights_digest
    model = AutoModelForCausalLM.from_pretrained(report["model"])
    assert model.config.vocab_size == len(AutoTokenizer.from_pretrained(report["model"]))


def test_muon_trains_demonstrations(home: Path) -> None:
    config = (home / "sft.toml").read_text(encoding="utf-8")
    (home / "sft.toml").write_text(
        config.replace("epochs = 10", "epochs = 3").replace("[trainer]", '[trainer]\noptimizer = "muon"'),
        encoding="utf-8",
    )
    found = train_in_process(home)
    assert found.eval_loss is not None
    assert found.eval_loss_before is not None
    assert found.eval_loss < 0.9 * found.eval_loss_before
    (groups,) = {
        tuple("momentum" in group for group in torch.load(path, weights_only=True)["optimizer"]["param_groups"])
        for path in (home / "uninterrupted" / "checkpoints").glob("*/*.pt")
    }
    assert groups == (True, False, False)


def test_sft_ends_at_enough_loss_and_a_second_start_adds_nothing(home: Path) -> None:
    config = (home / "sft.toml").read_text(encoding="utf-8")
    (home / "sft.toml").write_text(config.replace("[trainer]", "enough_loss = 1.9\n[trainer]"), encoding="utf-8")
    first = train_in_process(home)
    assert first.is_finished
    assert first.eval_loss is not None
    assert first.eval_loss <= 1.9
    assert 0 < first.steps < 100
    assert first.steps % 20 == 0
    again = train_in_process(home)
    assert (again.is_finished, again.steps) == (True, first.steps)
    assert again.checkpoint.weights_digest == first.checkpoint.weights_digest


def test_an_sft_run_keeps_the_shards_of_other_runs_in_the_same_place(home: Path) -> None:
    shards = home / "shards"
    (shards / "another-run" / "step-000010-0123456789ab").mkdir(parents=True)
    settings = ("--set", f'trainer.shards_path="{shards}"', "--set", "trainer.max_steps=4")
    done = rollbook("sft", str(home / "sft.toml"), *settings, "--out", str(home / "run"))
    assert done.returncode == 0, done.stderr
    assert (shards / "another-run" / "step-000010-0123456789ab").is_dir()
    assert len(list(shards.iterdir())) == 2


def test_enough_loss_needs_validation_data() -> None:
    with pytest.raises(ValueError, match="set validation or validation_share"):
        SftConfig(data="x", enough_loss=0.1)


@pytest.mark.slow
def test_rollouts_of_a_run_with_tools_are_exported_and_learned_as_chats_and_as_tokens(tmp_path: Path) -> None:
    project = REPOSITORY / "rollbook" / "templates" / "tools"
    for module in ("tasks.py", "tools.py", "rewards.py"):
        shutil.copy(project / module, tmp_path / module)
    config = (project / "run.toml").read_text(encoding="utf-8")
    # The prompt says how many tools there are.
    config = config.replace(
        "{{ bos_token }}", "{{ bos_token }}{% if tools %} there are {{ tools | length }}{% endif %}"
    )
    changes = ("trainer.max_steps=8", "ledger.keep_payloads=true", "evaluation.every_steps=1000")
    run = SmallRun(tmp_path, changes, config=config)
    try:
        assert run.start().wait()["exit_code"] == 0
    finally:
        run.stop()
    tokenizer = ModelTokenizer.from_directory(RunDirectory(run.directory).initial_model)
    with open_run(run.directory) as record:
        groups = [record.samples(GroupId(row.group_id)) for row in record.groups(limit=10_000) if row.has_payload]
    played = {row.token_ids.tobytes() for group in groups if group for s in group.samples for row in s.sequences}
    for name, options in (("chats", ()), ("tokens", ("--tokens",))):
        file = tmp_path / f"{name}.jsonl"
        done = rollbook("export", str(run.directory), "--sft", str(file), "--min-reward", "1", *options)
        assert done.returncode == 0, done.stderr
        rows = read_demonstrations(file, tokenizer, max_tokens=99, is_strict=True).rows
        # An answer of this policy is one token, mostly not the end of its turn, which a chat always has.
        whole = [row.token_ids if row.token_ids.tobytes() in played else row.token_ids[:-1] for row in rows]
        assert {ids.tobytes() for ids in whole} <= played, "with the prompt that the policy saw"
        assert name == "chats" or all(len(ids) == len(row) for ids, row in zip(whole, rows, strict=True))
        assert "there are 1" in tokenizer.decode(whole[0].tolist())
        settings = {
            "model": {"path": str(RunDirectory(run.directory).initial_model)},
            "sft": {"data": file.name, "validation": file.name, "examples_per_step": 8, "epochs": 40},
            "trainer": {"lr": 1e-2, "max_steps": 60},
        }
        (tmp_path / f"{name}.toml").write_text(tomli_w.dumps(settings), encoding="utf-8")
        done = rollbook("sft", str(tmp_path / f"{name}.toml"), "--out", str(tmp_path / name))
        assert done.returncode == 0, done.stderr
        report = json.loads(done.stdout.splitlines()[-1])
        assert report["eval_loss"] < 0.7 * report["eval_loss_before"]


def test_resuming_sft_with_other_settings_is_rejected(home: Path) -> None:
    write_or_check_manifest(home, load_sft_config(home / "sft.toml"), "digest", total_steps=9)
    write_or_check_manifest(home, load_sft_config(home / "sft.toml"), "digest", total_steps=9)
    with pytest.raises(RunError, match=r"trainer differ.*choose another --out"):
        write_or_check_manifest(home, load_sft_config(home / "sft.toml", ["trainer.lr=0.5"]), "digest", total_steps=9)
    with pytest.raises(RunError, match="data_digest differ"):
        write_or_check_manifest(home, load_sft_config(home / "sft.toml"), "other", total_steps=9)


def test_settings_that_sft_would_ignore_are_rejected_with_their_paths(home: Path) -> None:
    done = rollbook("sft", str(home / "sft.toml"), "--set", "trainer.clip_low=0.1", "--set", "sft.data=nothing.jsonl")
    assert done.returncode == 2
    assert "trainer.clip_low: is not read by `rollbook sft`" in done.stderr
    assert "sft.data: no such file" in done.stderr


def test_a_model_that_is_incomplete_is_refused_before_the_training(home: Path) -> None:
    file = home / "sft.toml"
    (home / "empty").mkdir()
    built = CONFIG[CONFIG.index("[model.build]") : CONFIG.index("[sft]")]
    file.write_text(CONFIG.replace(built, '[model]\npath = "empty"\n'), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"sft\.toml:5: model\.path: .*/empty has no config\.json"):
        run_sft(file, out=home / "out", overrides=())
    assert not (home / "out").exists()


@given(
    count=st.integers(min_value=1, max_value=50),
    a_step=st.integers(min_value=1, max_value=20),
    epochs=st.integers(min_value=1, max_value=3),
    seed=st.integers(min_value=0, max_value=9),
)
def test_every_epoch_trains_every_demonstration_once(count: int, a_step: int, epochs: int, seed: int) -> None:
    config = SftConfig(data="x", examples_per_step=a_step, epochs=epochs)
    total = steps_of(count, config, max_steps=None)
    trained = [n for step in range(1, total + 1) for n in numbers_of_step(step, count, config, seed=seed)]
    for epoch in range(epochs):
        assert sorted(trained[epoch * count : (epoch + 1) * count]) == list(range(count))
    assert len(trained) == epochs * count


def test_the_fields_that_sft_reads_exist() -> None:
    assert set(TrainerConfig.model_fields) >= READ_BY_SFT
