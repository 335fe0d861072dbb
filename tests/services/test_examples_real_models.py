"""The examples for real models (09 to 11): their tasks, splits and scores; and all stages with a tiny model on a CPU."""

import asyncio
import json
import os
import random
import shutil
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from benchmarks.learning.aws_credit import LARGE, SMALL, Size, write_study
from benchmarks.learning.recipe import difference, table
from rollbook.contracts.task import Observation
from rollbook.contracts.trajectory import EndReason
from rollbook.envs.builtin.awscli.tasks.task_bank import task_bank
from rollbook.rollout.agents.program import open_workspace
from rollbook.rollout.agents.rollout import make_rollout
from rollbook.rollout.settings import EpisodeLimits
from rollbook.run.config.run import load_config
from rollbook.run.config.sft import load_sft_config
from rollbook.run.config.study import load_study
from rollbook.trainer.model.model_directory import prepare_model_directory
from rollbook.trainer.model_config import ModelBuildConfig, ModelConfig
from tests.parts.rollout.agents import agent_setup, assert_matches_engine, in_order
from tests.parts.rollout.guessing import GuessingEnvironment, setup_of
from tests.parts.run.examples import modules_of
from tests.parts.run.small import REPOSITORY
from tests.parts.sandbox.bubblewrap import require_bubblewrap

AWS = REPOSITORY / "examples" / "09_aws_smollm2"
GYM = REPOSITORY / "examples" / "10_reasoning_gym"
SHELL = REPOSITORY / "examples" / "11_shell_agent"
AGENTS_PATH = f"{REPOSITORY / '.venvs' / 'agents' / 'bin'}:{os.environ['PATH']}"
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}{% if m.role == 'assistant' %}<eos>{% else %}\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
ON_A_CPU = (
    "trainer.device=cpu",
    "trainer.compute_dtype=float32",
    "trainer.threads=1",
    "trainer.max_steps=6",
    "inference.device=cpu",
    "inference.dtype=float32",
    "inference.kv_memory_mb=200",
    "rollout.workers=1",
    "rollout.drop_constant_reward=false",
    "evaluation.episodes=1",
    "evaluation.max_tasks=12",
)


@pytest.fixture(scope="module")
def aws_modules() -> Iterator[dict[str, ModuleType]]:
    with modules_of(AWS, ("cloud_tasks", "prepare_clouds")) as found:
        yield found


@pytest.fixture(scope="module")
def cloud_tasks(aws_modules: dict[str, ModuleType]) -> ModuleType:
    return aws_modules["cloud_tasks"]


@pytest.fixture(scope="module")
def puzzles() -> Iterator[ModuleType]:
    with modules_of(GYM, ("puzzles",)) as found:
        yield found["puzzles"]


def test_held_out_kinds_cover_every_tier_and_are_never_trained(cloud_tasks: ModuleType) -> None:
    trained, held_out = (set(cloud_tasks.kinds(is_held_out=value)) for value in (False, True))
    bank = task_bank()
    assert trained | held_out == set(bank)
    assert not trained & held_out
    assert {bank[kind].tier for kind in held_out} == {task.tier for task in bank.values()}


def test_held_out_names_occur_in_no_training_task(cloud_tasks: ModuleType) -> None:
    def pairs(split: str) -> set[tuple[str, str]]:
        texts = [str(value) for row in cloud_tasks.tasks(split, 6) for value in row["variants"][0].values()]
        words = [text.split("-") for text in texts]
        return {(w[0], w[1]) for w in words if len(w) == 2 and set(w) <= set(cloud_tasks.WORDS)}

    train, names = pairs("train"), pairs("names")
    assert len(train) > 300
    assert not train & names
    assert all(cloud_tasks.is_held_out_pair(pair) for pair in names)


def test_other_names_keep_the_references_between_variables(cloud_tasks: ModuleType) -> None:
    variant = {"bucket": "logs", "name": "logs", "other": "photos", "port": 443, "size": "logs"}
    found = cloud_tasks.renamed(variant, random.Random(1), is_held_out=False)
    assert found["bucket"] == found["name"] != found["other"]
    assert (found["port"], found["size"]) == (443, "logs")


def test_an_observation_is_short_and_keeps_ids(cloud_tasks: ModuleType) -> None:
    output = json.dumps({"Bucket": {"Name": "a", "CreationDate": "2026"}, "Ids": ["x", "y"]})
    assert cloud_tasks.seen_by_agent(output) == "Name=a Ids=x Ids=y"
    key = json.dumps({"KeyMetadata": {"KeyId": "1a2b", "CreationDate": 17.5}})
    assert cloud_tasks.seen_by_agent(key) == "KeyId=1a2b"
    queue = json.dumps({"Attributes": {"VisibilityTimeout": "90", "CreatedTimestamp": "17", "LastModified": "2026"}})
    assert cloud_tasks.seen_by_agent(queue) == "VisibilityTimeout=90"
    choices = "usage: aws\nerror: argument operation: Invalid choice, valid choices are:\n\nlist-keys\n(exit code 2)"
    assert cloud_tasks.seen_by_agent(choices) == "error: argument operation: Invalid choice"
    options = "usage: aws [options] <command>\n\nUnknown options: --size, 1\n(exit code 255)"
    assert cloud_tasks.seen_by_agent(options) == "error: Unknown options: --size, 1 (exit code 255)"
    assert cloud_tasks.seen_by_agent("") == "ok"
    assert len(cloud_tasks.seen_by_agent("z" * 5000)) == cloud_tasks.OUTPUT_CHARS


def test_a_demonstration_uses_only_what_the_agent_was_shown(
    aws_modules: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cloud_tasks = aws_modules["cloud_tasks"]
    # Too short for the id of the new key, which the second command of the encryption task needs.
    monkeypatch.setattr(cloud_tasks, "OUTPUT_CHARS", 10)
    needs_id, needs_none = cloud_tasks.tasks("train", 1, only=["s3-default-encryption", "s3-create-bucket"])
    chats = asyncio.run(aws_modules["prepare_clouds"].play([needs_id, needs_none], clouds=1))
    assert list(chats) == [needs_none["id"]]
    printed = capsys.readouterr().err
    assert f"{needs_id['id']} is left out" in printed
    assert "1 of 2 solutions use a value that the agent was not shown" in printed


class RepeatingCloud(GuessingEnvironment):
    """Every command has the same output, and none solves the task."""

    def __init__(self, output: str) -> None:
        super().__init__()
        self._output = output

    async def step(self, action: str) -> Observation:
        return Observation(text=self._output, solved=False)


@pytest.mark.parametrize(
    ("output", "num_turns", "end"),
    [
        ("error: argument command: Invalid choice", 3, EndReason.DONE),
        ("The bucket does not exist\n(exit code 254)", 3, EndReason.DONE),
        ("(no output)", 5, EndReason.MAX_TURNS),
    ],
)
async def test_an_episode_ends_after_three_failed_commands(
    cloud_tasks: ModuleType, output: str, num_turns: int, end: EndReason
) -> None:
    @asynccontextmanager
    async def open_environment() -> AsyncIterator[RepeatingCloud]:
        yield RepeatingCloud(output)

    setup, _ = setup_of(limits=EpisodeLimits(max_turns=5))
    rollout = cloud_tasks.make_rollout(replace(setup, open_environment=open_environment))
    sample = await rollout({"id": "sts-account--train-0-0", "secret": 1})
    assert (len(sample.turns), sample.finish_reason, sample.solved) == (num_turns, end, False)


def test_no_held_out_question_is_trained_in_any_level(puzzles: ModuleType) -> None:
    pytest.importorskip("reasoning_gym")
    train = list(puzzles.rows("train", 20, held_out=8))
    held_out = list(puzzles.rows("test", 0, held_out=8))
    assert not {row["question"] for row in train} & {row["question"] for row in held_out}
    assert {row["id"] for row in train}.isdisjoint(row["id"] for row in held_out)
    assert set(Counter((row["kind"], row["tier"]) for row in held_out).values()) == {8}
    assert len({row["kind"] for row in train}) >= 8
    assert {row["tier"] for row in train} == {1, 2, 3}
    assert all(puzzles.is_right(f" {row['answer']}.\n", row["answer"]) for row in train)


@pytest.fixture(scope="module")
def shell() -> Iterator[dict[str, ModuleType]]:
    with modules_of(SHELL, ("shell_tasks", "prepare_tasks")) as found:
        yield found


def test_no_held_out_shell_task_is_trained(shell: dict[str, ModuleType]) -> None:
    rows = shell["shell_tasks"].rows
    train, held_out = list(rows("train", 200, held_out=60)), list(rows("test", 0, held_out=60))
    assert len(train) == 200
    assert len({row["kind"] for row in held_out}) == 10

    def keys(some: list[dict[str, Any]]) -> set[str]:
        return {repr((row["goal"], row["files"])) for row in some}

    assert len(keys(train)) == 200
    assert not keys(train) & keys(held_out)


async def test_the_reference_solutions_of_shell_tasks_are_solved_and_the_start_is_not(
    shell: dict[str, ModuleType], tmp_path: Path
) -> None:
    solved = shell["shell_tasks"].solved
    for row in shell["shell_tasks"].rows("train", 20, held_out=0):
        async with open_workspace(row, None) as played:
            assert not solved(played, "", [])
            for command in row["solution"]:
                await asyncio.to_thread(subprocess.run, ["sh", "-c", command], cwd=played["workspace"], check=True)
            assert solved(played, "", [])


async def test_the_shell_agent_sends_the_prompts_of_its_demonstrations(
    shell: dict[str, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real program, in its sandbox, plays a demonstration to its end."""
    require_bubblewrap()
    if shutil.which("mini", path=AGENTS_PATH) is None:
        pytest.skip("mini-swe-agent is not installed (make test-agents)")
    monkeypatch.setenv("PATH", AGENTS_PATH)
    (row,) = shell["shell_tasks"].rows("train", 1, held_out=0)
    shown = shell["prepare_tasks"].demonstration(row, shell["prepare_tasks"].agent_templates())["messages"]
    replies = [message["content"] for message in shown if message["role"] == "assistant"]
    settings = tomllib.loads((SHELL / "run.toml").read_text(encoding="utf-8"))["rollout"]["settings"]
    async with agent_setup(tmp_path, in_order(*(f"{reply}<|im_end|>" for reply in replies)), settings=settings) as (
        setup,
        record,
    ):
        sample = await make_rollout(setup)(row)
    assert sample is not None
    assert (sample.reward, sample.solved, len(sample.sequences)) == (1.0, True, 1), sample.facts
    assert sample.messages is not None
    assert [{"role": one["role"], "content": one["content"]} for one in sample.messages] == shown
    assert_matches_engine(sample, record)


def test_a_reply_with_more_than_the_answer_is_wrong(puzzles: ModuleType) -> None:
    assert not puzzles.is_right("7 or 8", "7")
    assert not puzzles.is_right("", "7")


@pytest.mark.parametrize("example", [AWS, GYM, SHELL])
def test_the_configs_of_the_examples_are_valid(example: Path, tmp_path: Path) -> None:
    (tmp_path / "tasks.jsonl").write_text("{}\n", encoding="utf-8")
    data = json.dumps(str(tmp_path / "tasks.jsonl"))
    # The data are prepared by the user.
    load_config(example / "run.toml", [f"tasks.source={data}", f"evaluation.source={data}"])
    load_sft_config(example / "sft.toml", [f"sft.data={data}"])


@pytest.mark.parametrize("name", ["lag_study_gpu.toml", "lag_study_cpu.toml"])
def test_the_lag_studies_compare_every_recipe_at_the_largest_lag(name: str) -> None:
    study = load_study(REPOSITORY / "benchmarks" / "learning" / name)
    at = Counter(cell.labels["lag"] for cell in study.cells if cell.seed == 0)
    assert at["bound 0"] == 1
    assert at["bound 8"] == at["bound 4"] == 8


@pytest.mark.parametrize("size", [LARGE, SMALL])
def test_the_comparison_of_credit_has_four_kinds_with_each_seed(tmp_path: Path, size: Size) -> None:
    (tmp_path / "data").mkdir()
    for name in ("train", "held_out"):
        (tmp_path / "data" / f"{name}.jsonl").write_text('{"id": "a", "split": "train"}\n', encoding="utf-8")
    study = load_study(write_study(size, tmp_path, steps=9, seeds=3, port=8171))
    assert len(study.cells) == 12
    loaded = {cell.name: load_config(study.config or tmp_path, cell.overrides).config for cell in study.cells[:4]}
    assert [config.trainer.recipe.advantage for config in loaded.values()] == ["rloo", "turn_rloo", "none", "rloo"]
    assert [len(config.rollout.teacher) for config in loaded.values()] == [0, 0, 1, 1]
    assert {config.gate.batch_policy for config in loaded.values()} == {"trim"}
    assert {config.model.path for config in loaded.values()} == {str(tmp_path / "policy" / "final")}


def measured(mean: float) -> dict[str, Any]:
    solved = {"mean": mean, "low": mean - 0.1, "high": mean + 0.1}
    return {"results": [{"label": "all", "tasks": 8, "episodes": 16, "solved": solved}]}


def test_the_table_marks_a_gain_whose_intervals_are_apart() -> None:
    apart = table({"base": measured(0.1), "warm": measured(0.3), "trained": measured(0.6)})[-1]
    assert apart == "| all | 8 × 2 | 10.0% [0%–20%] | 30.0% [20%–40%] | **60.0% [50%–70%]** |"
    assert "**" not in table({"base": measured(0.1), "warm": measured(0.3), "trained": measured(0.4)})[-1]
    without_base = table({"warm": measured(0.3), "trained": measured(0.4)})[-1]
    assert without_base == "| all | 8 × 2 | – | 30.0% [20%–40%] | 40.0% [30%–50%] |"


def test_the_difference_is_that_of_the_tasks_scored_in_both_evaluations() -> None:
    def evaluated(**solved: list[bool]) -> dict[str, Any]:
        return {"tasks": [{"id": task, "solved": found} for task, found in solved.items()]}

    before = evaluated(a=[False, False], b=[True, True], c=[False, True], only=[True])
    after = evaluated(a=[True, True], b=[True, True], c=[True, True], only=[])
    assert difference(before, after).mean == pytest.approx(0.5)


def tiny_model(directory: Path) -> Path:
    build = ModelBuildConfig(
        tokenizer="bytes",
        hidden_size=32,
        layers=1,
        heads=2,
        kv_heads=2,
        intermediate_size=64,
        max_position_embeddings=2048,
        chat_template=TEMPLATE,
    )
    return prepare_model_directory(ModelConfig(build=build), directory, seed=0)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("example", "prepare", "settings"),
    [
        (
            GYM,
            ("prepare_puzzles.py", "--each", "4", "--held-out", "2", "--shown", "4"),
            ("gate.groups_per_step=4", "gate.max_groups_in_flight=8", "rollout.sampling.max_tokens=8"),
        ),
        (
            AWS,
            (
                "prepare_clouds.py",
                "--each",
                "6",
                "--clouds",
                "2",
                "--only",
                "s3-create-bucket",
                "iam-create-user",
                "sts-account",
                "dynamodb-enable-ttl",
            ),
            (
                "gate.groups_per_step=2",
                "gate.max_groups_in_flight=1",
                "rollout.completions_per_prompt=2",
                "rollout.max_turns=2",
                "rollout.sampling.max_tokens=16",
                "env.pool_size=4",
                "evaluation.concurrency=2",
            ),
        ),
        (
            SHELL,
            ("prepare_tasks.py", "--train", "8", "--held-out", "4", "--shown", "8"),
            (
                "gate.groups_per_step=2",
                "gate.max_groups_in_flight=2",
                "rollout.completions_per_prompt=2",
                "rollout.max_turns=2",
                "rollout.sampling.max_tokens=16",
                "trainer.max_steps=2",
                "trainer.warmup_steps=0",
                "evaluation.concurrency=2",
                "evaluation.max_tasks=4",
            ),
        ),
    ],
)
def test_all_stages_of_an_example_run_with_a_tiny_model(
    tmp_path: Path, example: Path, prepare: tuple[str, ...], settings: tuple[str, ...]
) -> None:
    if example is GYM:
        pytest.importorskip("reasoning_gym")
    if example is SHELL:
        require_bubblewrap()
        if shutil.which("mini", path=AGENTS_PATH) is None:
            pytest.skip("mini-swe-agent is not installed (make test-agents)")
    home = tmp_path / example.name
    home.mkdir()
    for source in example.glob("*.*"):
        (home / source.name).write_text(source.read_text(encoding="utf-8"), encoding="utf-8")
    script, *options = prepare
    subprocess.run([sys.executable, str(home / script), *options], check=True)
    command = [
        sys.executable,
        "-m",
        "benchmarks.learning.recipe",
        str(home),
        "--model",
        str(tiny_model(tmp_path / "model")),
    ]
    command += ["--minutes", "12", "--out", str(tmp_path / "out")]
    for text in (*ON_A_CPU, *settings):
        command += ["--set", text]
    for text in (
        "trainer.device=cpu",
        "trainer.compute_dtype=float32",
        "trainer.max_steps=12",
        "sft.validation_share=0.4",
        "sft.examples_per_step=1",
        "sft.epochs=12",
    ):
        command += ["--set-sft", text]
    environment = {**os.environ, "PATH": AGENTS_PATH}
    done = subprocess.run(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True, check=False, env=environment)
    assert done.returncode == 0
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["steps"] == (2 if example is SHELL else 6)
    assert set(report["results"]) == {"base", "warm", "trained"}
    assert all(found[0]["solved"] is not None for found in report["results"].values())
    assert "after training" in (tmp_path / "out" / "report.md").read_text(encoding="utf-8")
