"""A configuration with several faults: all are reported at once, each with its line and, for unknown names, with a suggestion."""

import re
import sys
from pathlib import Path

import pytest

from rollbook.contracts.errors import RunError
from rollbook.rollout.verifiers.process import rows as verifiers_rows
from rollbook.run.config.run import ConfigError, RunConfig, dump_toml, load_config
from rollbook.run.config.suggestions import RELATED, RENAMED, settings_of, suggestion
from tests.parts.run.small import REPOSITORY

GOOD = """
[model.build]
vocabulary = ["a"]
[tasks]
source = "rollbook.envs.builtin.number_guessing:number_guessing_tasks"
[trainer]
max_steps = 10
"""


def messages_of(tmp_path: Path, text: str, *overrides: str) -> list[str]:
    file = tmp_path / "run.toml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load_config(file, overrides)
    return [str(fault).removeprefix(f"{tmp_path}/") for fault in caught.value.faults]


# Each of these was hidden by another one: by an unknown field of its section, by a wrong value, or by another contradiction.
FIVE = """
[model.build]
vocabulary = ["a"]
heads = 3
layers = "two"
[tasks]
source = "missing.jsonl"
[rollout]
group_size = 4
min_samples = 9
[trainer]
max_stps = 10
warmup_steps = 10
keep_every = 3
"""


def test_a_fault_hides_no_other(tmp_path: Path) -> None:
    assert messages_of(tmp_path, FIVE) == [
        "run.toml:4: model.build.heads: hidden_size 128 does not split into 3 heads of even width",
        "run.toml:5: model.build.layers: Input should be a valid integer, not 'two'",
        f"run.toml:7: tasks.source: no such file: {tmp_path}/missing.jsonl",
        "run.toml:9: rollout.group_size: unknown field; did you mean 'rollout.completions_per_prompt'?",
        "run.toml:10: rollout.min_samples: min_samples is 9, but a group has 4 samples: every group would be dropped; "
        "lower min_samples or raise completions_per_prompt",
        "run.toml:12: trainer.max_stps: unknown field; did you mean 'max_steps'?",
        "run.toml:13: trainer.warmup_steps: warmup_steps 10 must be below max_steps 10",
        "run.toml:14: trainer.keep_every: keep_every 3 must be a multiple of checkpoint_every 20: other steps have no checkpoint",
    ]


def test_a_fault_that_follows_from_another_one_is_not_reported(tmp_path: Path) -> None:
    # Without max_steps a run would never end, and without a source it has no tasks: neither is left out here.
    assert messages_of(tmp_path, GOOD.replace("max_steps = 10", 'max_steps = "ten"')) == [
        "run.toml:7: trainer.max_steps: Input should be a valid integer, not 'ten'"
    ]
    assert messages_of(tmp_path, GOOD.replace("source", "sorce")) == [
        "run.toml:5: tasks.sorce: unknown field; did you mean 'source'?"
    ]
    assert messages_of(tmp_path, GOOD.replace("[tasks]", "[taks]")) == [
        "run.toml:4: taks: unknown section; did you mean 'tasks'?"
    ]
    # The suggested setting is in a table that this run must not have.
    [message] = messages_of(tmp_path, GOOD + "[ledger]\nport = 80\n")
    assert "ledger.port: unknown field" in message
    [message] = messages_of(tmp_path, GOOD.replace('["a"]', "[]"))
    assert "vocabulary is empty" in message


def test_a_value_of_another_kind_is_described_in_words_of_toml(tmp_path: Path) -> None:
    def message_of(override: str) -> str:
        [message] = messages_of(tmp_path, GOOD, override)
        return message.removeprefix("--set: ")

    assert message_of("telemetry.sinks=wandb") == "telemetry.sinks: Input should be a list, not 'wandb'"
    assert message_of("evaluation=3") == "evaluation: Input should be a table"
    assert message_of("trainer.max_steps=1.5") == "trainer.max_steps: Input should be a valid integer, not 1.5"


def test_the_beginning_of_a_setting_is_answered_with_the_whole_names(tmp_path: Path) -> None:
    [message] = messages_of(tmp_path, GOOD, "gate.groups=3")
    assert message.endswith("did you mean 'groups_per_step' or 'max_groups_in_flight'?")


def test_a_divergence_that_no_teacher_gives_is_reported(tmp_path: Path) -> None:
    alone = GOOD + 'loss = "distill"\n[rollout]\nfunction = "chat"\n'
    assert any("rollout.teacher: a divergence from a teacher is trained" in one for one in messages_of(tmp_path, alone))
    taught = alone + '[rollout.teacher]\nurl = "http://teacher/v1"\nmodel = "m"\n'
    assert any(
        "set rollout.teacher.top_k" in one for one in messages_of(tmp_path, taught, 'trainer.distill_kl="forward"')
    )


def test_settings_of_distillation_that_nothing_reads_are_reported_with_what_to_set(tmp_path: Path) -> None:
    run = GOOD + '[rollout]\nfunction = "chat"\n'
    for setting in ("trainer.distill_until=5", 'trainer.distill_kl="reverse"'):
        [message] = messages_of(tmp_path, run, setting)
        assert "the divergence from a teacher has no weight. Set distill_coef" in message
    taught = run + '[rollout.teacher]\nurl = "http://teacher/v1"\nmodel = "m"\n'
    [message] = messages_of(tmp_path, taught)
    assert "rollout.teacher: nothing is trained on its scores: set trainer.distill_coef" in message
    for used in ("trainer.distill_coef=0.1", "trainer.distill_coef=0", 'trainer.loss="distill"'):
        load_config(tmp_path / "run.toml", (used,))
    hinted = (
        run + '[rollout.teacher]\npolicy = true\ncontext = "hint"\n[inference]\nengine = "vllm"\nurls = ["http://v"]\n'
    )
    [message] = messages_of(tmp_path, hinted, "trainer.distill_coef=0.1")
    assert "engine = 'vllm' does not report the version that scored a prompt" in message


def test_a_misspelt_setting_is_checked_under_its_right_name(tmp_path: Path) -> None:
    first, second = messages_of(tmp_path, GOOD.replace("max_steps = 10", "max_steps = 10\nlearning_rate = -1"))
    assert first == "run.toml:8: trainer.learning_rate: unknown field; did you mean 'trainer.lr'?"
    assert second == "run.toml:8: trainer.learning_rate: Input should be greater than 0, not -1"


@pytest.mark.parametrize(
    ("setting", "suggested"),
    [
        ("trainer.learning_rate=1", "trainer.lr"),
        ("rollout.group_size=4", "rollout.completions_per_prompt"),
        ("trainer.num_generations=4", "rollout.completions_per_prompt"),
        ("trainer.beta=0.1", "trainer.kl_coef"),
        ("rollout.kl_coef=0.1", "trainer.kl_coef"),
        ("trainer.max_completion_length=64", "rollout.sampling.max_tokens"),
        ("trainer.temperature=1.0", "rollout.sampling.temperature"),
        ("rollout.temprature=1.0", "rollout.sampling.temperature"),
        ("trainer.lora_rank=8", "trainer.lora.rank"),
        ("model.name='x'", "model.path"),
        ("actor_rollout_ref.rollout.n=8", "rollout.completions_per_prompt"),
        ("actor_rollout_ref.actor.optim.lr=1e-6", "trainer.lr"),
        ("actor_rollout_ref.model.path='m'", "model.path"),
        ("data.train_batch_size=64", "gate.groups_per_step"),
        ("algorithm.adv_estimator='grpo'", "trainer.advantage"),
        ("trainer.output_dir='out'", "--run-dir"),
        ("rollout.rewards.functions.right.wieght=2", "weight"),
        ("telemetry.colour=1", "wandb_project"),
    ],
)
def test_an_unknown_setting_is_answered_with_the_one_that_was_meant(
    tmp_path: Path, setting: str, suggested: str
) -> None:
    path = setting.partition("=")[0]
    message = next(
        one for one in messages_of(tmp_path, GOOD, setting) if one.startswith(f"--set: {path}: unknown field")
    )
    assert suggested in message.partition("unknown field")[2]


def test_every_suggested_setting_exists() -> None:
    known = set(settings_of(RunConfig))
    assert {*RENAMED.values(), *(setting for setting, _ in RELATED.values() if setting)} <= known


def test_the_names_of_coming_from_are_suggested_as_that_page_says() -> None:
    page = (REPOSITORY / "docs" / "coming-from.md").read_text(encoding="utf-8")
    known = set(settings_of(RunConfig))
    checked = 0
    for left, right in re.findall(r"^\| (`.*) \| (.+) \|$", page, re.MULTILINE):
        named = [name for name in re.findall(r"`([\w.]+)", right) if name in known]
        for name in re.findall(r"`([a-z_.]+)`", re.sub(r"\(.*?\)", "", left)):  # values are in parentheses
            found = suggestion(f"trainer.{name}", RunConfig).text
            assert found, name
            if named and name not in ("resume_mode", "partial_rollout"):  # answered with a command
                checked += 1
                assert any(f"'{one}" in found for one in named), (name, found)
    assert checked > 40


def test_only_what_differs_from_the_defaults_is_shown(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(GOOD + "lr = 0.001\ncheckpoint_every = 20\n[run]\nname = 'run'\n", encoding="utf-8")
    config = load_config(file).config
    assert dump_toml(config, is_full=False).split("\n\n") == [
        '[model.build]\nvocabulary = [\n    "a",\n]',
        '[tasks]\nsource = "rollbook.envs.builtin.number_guessing:number_guessing_tasks"',
        "[trainer]\nmax_steps = 10\nlr = 0.001\n",
    ]


TASKSET = """
[model.build]
vocabulary = ["a"]
[trainer]
max_steps = 10
"""


def test_a_taskset_of_verifiers_brings_its_tasks_and_its_rollout_function(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    python = tmp_path / "python"
    python.symlink_to(sys.executable)
    file.write_text(f'env = "verifiers:sums-v1"\n{TASKSET}[rollout.settings]\npython = "./python"\n', encoding="utf-8")
    short = load_config(file).config
    long_text = f'{TASKSET}[env]\nname = "verifiers:sums-v1"\npython = "./python"\nargs = {{ taskset = {{ n = 3 }} }}\n'
    file.write_text(long_text, encoding="utf-8")
    long = load_config(file, ["tasks.limit=5"]).config
    assert short.rollout.function == long.rollout.function == "verifiers"
    assert short.rollout.settings == {"taskset": "sums-v1", "python": str(python), "args": {}}
    assert long.tasks.source == "rollbook.rollout.verifiers.process:rows"
    assert long.tasks.args == {**short.rollout.settings, "args": {"taskset": {"n": 3}}, "limit": 5}
    assert load_config(file, ["tasks.source=mine.jsonl"], source_dir=tmp_with_tasks(tmp_path)).config.tasks.args == {}


def tmp_with_tasks(tmp_path: Path) -> Path:
    (tmp_path / "mine.jsonl").write_text('{"task": {}}\n', encoding="utf-8")
    return tmp_path


def test_faulty_settings_of_verifiers_say_what_to_do(tmp_path: Path) -> None:
    named = f'{TASKSET}[env]\nname = "verifiers:sums-v1"\n'
    with_tasks = f'{GOOD}[env]\nname = "verifiers:sums-v1"\n'
    (fault,) = messages_of(tmp_path, named)
    assert "env.python: is not set. Name the Python of a virtual environment" in fault
    (fault,) = messages_of(tmp_path, f'{named}python = "no/python"\n')
    assert f"env.python: '{tmp_path}/no/python' is not a program" in fault
    (fault,) = messages_of(tmp_path, f"{with_tasks}pool_size = 3\n")
    assert "pool_size: no effect with name = 'verifiers:sums-v1'; remove pool_size" in fault
    (fault,) = messages_of(tmp_path, f'{with_tasks}[rollout]\nfunction = "chat"\n')
    assert "the rollout function `verifiers` must play name = 'verifiers:sums-v1'; remove rollout.function" in fault
    (fault,) = messages_of(tmp_path, f'{GOOD}[env]\nname = "aws"\npython = "python3"\n')
    assert "python: it is for name = 'verifiers:NAME' only" in fault
    shared = (
        f"{named}python = {sys.executable!r}\n[rollout]\ncompletions_per_prompt = 6\nsettings.samples_per_episode = 4\n"
    )
    (fault,) = messages_of(tmp_path, shared)
    assert "6 is not a multiple of rollout.settings.samples_per_episode = 4" in fault


def test_an_environment_without_verifiers_is_named_with_the_command_that_installs_it() -> None:
    with pytest.raises(RunError) as caught:
        list(verifiers_rows(taskset="mine", python=sys.executable, args={}))
    assert f"{sys.executable} -m pip install verifiers" in str(caught.value)
    assert "Traceback" not in str(caught.value)


def test_an_sglang_engine_needs_urls_and_a_directory(tmp_path: Path) -> None:
    (fault,) = messages_of(tmp_path, f'{GOOD}[inference]\nengine = "sglang"\n')
    assert "engine = 'sglang' needs the urls of running servers; the run starts none" in fault
    external = f'{GOOD}[inference]\nengine = "sglang"\nurls = ["http://gpu1:30000"]\n'
    (fault,) = messages_of(tmp_path, external + 'transfer = "pull"\n')
    assert "SGLang loads weights from a directory, not by 'pull'" in fault
    file = tmp_path / "run.toml"
    file.write_text(external, encoding="utf-8")
    assert load_config(file).config.inference.engine == "sglang"
