"""Run configs: all errors are reported at once, each with its path."""

import io
import tomllib
from pathlib import Path

import pytest
from rich.console import Console

from rollbook.commands.training.host import host
from rollbook.commands.training.train import resolve_run, write_or_check_config
from rollbook.contracts.errors import RunError
from rollbook.contracts.freshness import BatchPolicy
from rollbook.run.config.run import ConfigError, dump_toml, load_config, load_resolved_config
from rollbook.run.config.source import changed_fields, check_resume
from rollbook.run.directory import RunDirectory

GOOD = """
[run]
name = "small"
seed = 7
[model.build]
vocabulary = ["a", "b"]
[tasks]
source = "rows.jsonl"
[rollout]
function = "chat"
[trainer]
max_steps = 3
"""


def write_config(tmp_path: Path, text: str) -> Path:
    (tmp_path / "rows.jsonl").write_text('{"id": "one"}\n', encoding="utf-8")
    path = tmp_path / "run.toml"
    path.write_text(text, encoding="utf-8")
    return path


def faults_of(tmp_path: Path, text: str, overrides: tuple[str, ...] = ()) -> dict[str, str]:
    with pytest.raises(ConfigError) as caught:
        load_config(write_config(tmp_path, text), overrides)
    return {fault.path: fault.message for fault in caught.value.faults}


def test_a_small_config_is_enough(tmp_path: Path) -> None:
    loaded = load_config(write_config(tmp_path, GOOD))
    assert loaded.config.trainer.max_steps == 3
    assert loaded.source_dir == tmp_path.resolve()


def test_settings_that_run_code_of_the_policy_unconfined_are_named(tmp_path: Path) -> None:
    file = write_config(tmp_path, GOOD)
    assert load_config(file).config.unconfined == ()
    agent = ("rollout.function=agent", "rollout.settings.agent=codex", "rollout.settings.reward=rollout.rewards")
    for table in ("env.args.sandbox", "rollout.settings.sandbox"):
        chosen = agent if table.startswith("rollout") else ("env.name=files", "env.args={}")
        found = load_config(file, (*chosen, f"{table}=none")).config
        assert found.unconfined == (f'{table} = "none"',)


def test_a_model_tasks_and_a_reward_are_enough(tmp_path: Path) -> None:
    (tmp_path / "scores.py").write_text("def length(case): return 0.0\n", encoding="utf-8")
    scored = GOOD.replace('[rollout]\nfunction = "chat"\n', "")
    scored += '[rollout.rewards.functions.length]\npath = "scores:length"\n'

    def environment(text: str, *overrides: str) -> str:
        return load_config(write_config(tmp_path, text), overrides).config.env.name

    assert environment(scored) == "question"
    assert environment(scored, "env.name=maths") == "maths"
    assert environment(GOOD) == "number_guessing"
    assert environment(scored, "rollout.function=chat") == "number_guessing"


def test_five_mistakes_in_five_sections_are_listed_as_five(tmp_path: Path) -> None:
    faults = faults_of(
        tmp_path,
        """
[run]
name = "no spaces allowed"
[model.build]
vocabulary = ["a"]
heads = "four"
[tasks]
source = "missing.jsonl"
[gate]
groups_per_step = 0
[trainer]
max_steps = 3
learning_rate = 1e-3
[ledgre]
""",
    )
    assert set(faults) == {
        "run.name",
        "model.build.heads",
        "tasks.source",
        "gate.groups_per_step",
        "trainer.learning_rate",
        "ledgre",
    }
    assert "unknown field" in faults["trainer.learning_rate"]
    assert "unknown section" in faults["ledgre"]


def test_a_missing_or_invalid_file_is_one_fault(tmp_path: Path) -> None:
    assert "is not TOML" in faults_of(tmp_path, "[run")["file"]
    file = write_config(tmp_path, GOOD.replace('"chat"', "chat"))
    message = (
        f"{file}:10: file: is not TOML: Invalid value (at line 10, column 12): function = chat; a string needs quotes"
    )
    with pytest.raises(ConfigError) as caught:
        load_config(file)
    assert [str(fault) for fault in caught.value.faults] == [message]
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(tmp_path / "nowhere.toml")


def test_an_override_replaces_a_field_and_a_bad_one_is_a_fault(tmp_path: Path) -> None:
    loaded = load_config(
        write_config(tmp_path, GOOD), ["trainer.max_steps=9", "run.name=other", "gate.batch_policy=drop"]
    )
    assert (loaded.config.trainer.max_steps, loaded.config.run.name) == (9, "other")
    faults = faults_of(tmp_path, GOOD, ("nonsense", "trainer.max_steps.deep=1", "trainer.max_steps=-1"))
    assert len(faults) == 3


def test_settings_that_can_never_work_are_rejected(tmp_path: Path) -> None:
    assert "never end" in faults_of(tmp_path, GOOD.replace("max_steps = 3", ""))["trainer.max_steps"]
    assert "lease" in faults_of(tmp_path, GOOD, ("gate.group_deadline_s=1",))["gate.group_deadline_s"]
    assert (
        "rollout.max_total_tokens"
        in faults_of(tmp_path, GOOD, ("inference.max_model_len=16",))["inference.max_model_len"]
    )
    assert "trainer.ppo_n_minibatches" in faults_of(tmp_path, GOOD, ("trainer.ppo_n_minibatches=100000",))


def test_parts_is_the_default_except_where_groups_arrive_whole(tmp_path: Path) -> None:
    def policy(*overrides: str) -> BatchPolicy:
        return load_config(write_config(tmp_path, GOOD), overrides).config.gate.batch_policy

    assert policy() is BatchPolicy.PARTS
    assert policy("rollout.oversample=1") is BatchPolicy.WAIT
    assert policy("rollout.oversample=1", "gate.batch_policy=trim") is BatchPolicy.TRIM
    assert load_config(write_config(tmp_path, ATROPOS)).config.gate.batch_policy is BatchPolicy.WAIT
    assert "post whole groups" in faults_of(tmp_path, ATROPOS, ("gate.batch_policy=parts",))["gate.batch_policy"]


def test_a_quorum_needs_parts_and_parts_need_a_quorum_that_fits(tmp_path: Path) -> None:
    parts = ("gate.batch_policy=parts", "rollout.completions_per_prompt=8")
    rule = load_config(write_config(tmp_path, GOOD), parts).config.ledger_settings().rule
    assert (rule.samples_per_group, rule.quorum) == (8, 6)
    wait = load_config(write_config(tmp_path, GOOD), ["gate.batch_policy=wait"]).config.ledger_settings().rule
    assert (wait.samples_per_group, wait.quorum) == (1, None)
    assert (
        "this run uses 'trim'"
        in faults_of(tmp_path, GOOD, ("gate.batch_policy=trim", "rollout.quorum=2"))["rollout.quorum"]
    )
    assert "whole groups only" in faults_of(tmp_path, GOOD, (*parts, "rollout.oversample=1"))["rollout.oversample"]
    assert "rollout.quorum = 6" in faults_of(tmp_path, GOOD, (*parts, "rollout.min_samples=7"))["rollout.min_samples"]
    assert "never be reached" in str(faults_of(tmp_path, GOOD, (*parts, "rollout.quorum=9")))


def test_a_field_that_would_not_be_read_is_rejected(tmp_path: Path) -> None:
    assert (
        "scripted engine only" in faults_of(tmp_path, GOOD, ("inference.scripted.token_s=0.1",))["inference.scripted"]
    )
    assert "takes no args" in faults_of(tmp_path, GOOD, ("tasks.args.n=1",))["tasks.source"]


PLUGIN_SETTINGS = {
    "tasks.source": (),
    "evaluation.source": (),
    "env.name": (),
    "rollout.function": (),
    "rollout.filter": (),
    "rollout.rewards.functions.own.path": (),
    "rollout.settings.agent": ("rollout.function=agent",),
    "rollout.settings.reward": ("rollout.function=agent",),
    "rollout.settings.tool_parser": ("rollout.function=agent",),
    "inference.scripted.script": ("inference.engine=scripted",),
    "trainer.loss": ("trainer.advantage=group", "trainer.reduction=token_mean"),
    "trainer.advantage": (),
    "telemetry.sinks": (),
}


@pytest.mark.parametrize("setting", PLUGIN_SETTINGS)
def test_missing_user_code_is_reported_before_anything_starts(tmp_path: Path, setting: str) -> None:
    # The check must not run the user's code.
    (tmp_path / "mine.py").write_text("def present(): ...\nraise SystemExit('ran')\n", encoding="utf-8")
    needs = PLUGIN_SETTINGS[setting]
    form = f'{setting}=["{{}}"]' if setting == "telemetry.sinks" else f"{setting}={{}}"
    assert "no module 'no_such_module'" in faults_of(tmp_path, GOOD, (*needs, form.format("no_such_module:f")))[setting]
    assert "module mine has no 'absent'" in faults_of(tmp_path, GOOD, (*needs, form.format("mine:absent")))[setting]
    load_config(write_config(tmp_path, GOOD), [*needs, form.format("mine:present")])


def test_an_unknown_short_name_lists_the_known_ones_and_suggests_the_nearest(tmp_path: Path) -> None:
    for setting, wrong, known, nearest in (
        ("rollout.function", "agents", "agent, chat, remote", "agent"),
        ("env.name", "arithmetics", "arithmetic, aws", "arithmetic"),
    ):
        fault = faults_of(tmp_path, GOOD, (f"{setting}={wrong}",))[setting]
        assert known in fault
        assert f"did you mean '{nearest}'?" in fault
    assert "did you mean 'grpo'?" in str(faults_of(tmp_path, GOOD, ("trainer.loss=grppo",)))
    assert "did you mean 'rloo'?" in str(faults_of(tmp_path, GOOD, ("trainer.advantage=roo",)))


def test_a_module_without_an_attribute_must_define_make_rollout(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("", encoding="utf-8")
    assert "has no 'make_rollout'" in faults_of(tmp_path, GOOD, ("rollout.function=mine",))["rollout.function"]
    (tmp_path / "mine.py").write_text("from somewhere import make_rollout\n", encoding="utf-8")
    load_config(write_config(tmp_path, GOOD), ["rollout.function=mine"])


def test_sections_without_a_seed_use_the_seed_of_the_run(tmp_path: Path) -> None:
    config = load_config(write_config(tmp_path, GOOD), ["tasks.seed=1"]).config
    assert (config.tasks.seed, config.trainer.seed, config.inference.seed) == (1, 7, 7)


def test_the_resolved_config_reads_back_as_itself(tmp_path: Path) -> None:
    loaded = load_config(write_config(tmp_path, GOOD))
    again = tmp_path / "resolved.toml"
    again.write_text(dump_toml(loaded.config), encoding="utf-8")
    tomllib.loads(again.read_text(encoding="utf-8"))
    assert changed_fields(loaded.config, load_config(again).config) == {}


def test_a_resume_may_change_settings_that_do_not_affect_the_record(tmp_path: Path) -> None:
    old = load_config(write_config(tmp_path, GOOD)).config
    longer = load_config(write_config(tmp_path, GOOD), ["trainer.max_steps=9"]).config
    assert check_resume(old, longer, source="run") == {"trainer.max_steps": (3, 9)}


def test_a_changed_setting_is_printed_as_it_is_written(tmp_path: Path) -> None:
    file, run_dir, printed = write_config(tmp_path, GOOD), tmp_path / "[run]", io.StringIO()
    for overrides in ([], ['env.args={system="[/INST]"}']):
        loaded, directory = resolve_run(file, run_dir, overrides)
        directory.prepare()
        write_or_check_config(loaded, directory, Console(file=printed))
    assert f"resuming {run_dir}\n" in printed.getvalue()
    assert "'[/INST]'" in printed.getvalue()


def test_a_run_that_is_resumed_with_the_config_of_a_copied_project_uses_the_files_of_the_copy(tmp_path: Path) -> None:
    console = Console(file=io.StringIO())
    for name in ("first", "copy"):
        (tmp_path / name).mkdir()
        loaded, directory = resolve_run(write_config(tmp_path / name, GOOD), tmp_path / "run", [])
        directory.prepare()
        write_or_check_config(loaded, directory, console)
    of_processes = load_resolved_config(directory)
    assert of_processes.source_dir == loaded.source_dir == tmp_path / "copy"
    assert of_processes.search_path[: len(loaded.search_path)] == loaded.search_path


@pytest.mark.parametrize(
    "override", ["run.seed=8", "model.build.layers=1", "gate.groups_per_step=5", "tasks.shuffle=false"]
)
def test_a_resume_may_not_change_settings_that_affect_the_record(tmp_path: Path, override: str) -> None:
    old = load_config(write_config(tmp_path, GOOD)).config
    other = load_config(write_config(tmp_path, GOOD), [override]).config
    with pytest.raises(ConfigError, match="start a new run"):
        check_resume(old, other, source="run")


ATROPOS = """
[model.build]
vocabulary = ["a", "b"]
[tasks]
source = "atropos"
[trainer]
max_steps = 3
"""


def test_the_token_of_an_environment_server_reaches_the_processes_of_the_run_and_is_masked_for_display(
    tmp_path: Path,
) -> None:
    overrides = ("env.url=http://127.0.0.1:9", "env.token=secret-word")
    loaded = load_config(write_config(tmp_path, GOOD), overrides)
    again = load_config(write_config(tmp_path, dump_toml(loaded.config)))
    assert again.config.env.token is not None
    assert again.config.env.token.get_secret_value() == "secret-word"
    assert "secret-word" not in dump_toml(loaded.config, masks_secrets=True)


def test_an_atropos_source_rejects_rollout_and_env_settings(tmp_path: Path) -> None:
    loaded = load_config(write_config(tmp_path, ATROPOS))
    again = load_config(write_config(tmp_path, dump_toml(loaded.config)))
    assert again.config == loaded.config, "a resolved config contains every field and loads again"
    faults = faults_of(tmp_path, ATROPOS + "[rollout]\nmax_turns = 2\n[env]\nname = 'maths'\n")
    assert set(faults) == {"rollout", "env"}
    assert "post" in faults["rollout"]
    assert "epochs" in faults_of(tmp_path, ATROPOS, ("tasks.epochs=2",))["tasks.source"]
    assert "source" in faults_of(tmp_path, GOOD, ("tasks.atropos.port=9000",))["tasks.atropos"]


def test_a_hosted_run_rejects_trainer_settings(tmp_path: Path) -> None:
    path = write_config(tmp_path, GOOD + "lr = 0.5\n")
    with pytest.raises(RunError, match=r"not read by `rollbook host`: trainer\.lr"):
        host(path, run_dir=tmp_path / "run", overrides=(), parent_fd=None, console=Console(quiet=True))


def test_unknown_fields_of_a_recorded_run_are_reported_with_their_paths(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    directory.write_manifest(name="run", source_dir=tmp_path)
    directory.config_file.write_text(
        '[model]\npath = "gone"\n[tasks]\nsource = "gone:tasks"\n[rollout]\nledger_patience_s = 3.0\n', encoding="utf-8"
    )
    with pytest.raises(ConfigError, match=r"rollout\.ledger_patience_s: unknown field.*another version of Rollbook"):
        load_resolved_config(directory)


@pytest.mark.parametrize(
    ("overrides", "published"),
    [
        ((), "auto"),
        (("trainer.lora.rank=4",), "adapter"),
        (("trainer.lora.rank=4", "inference.publish='full'"), "full"),
        (("trainer.lora.experts=true",), "full"),
        (("trainer.lora.rank=4", "inference.engine='vllm'", "inference.vllm.python='python'"), "adapter"),
        (("trainer.lora.rank=4", "inference.engine='vllm'", "inference.urls=['http://a']"), "full"),
        (
            (
                "trainer.lora.rank=4",
                "inference.engine='vllm'",
                "inference.urls=['http://a']",
                "inference.publish='adapter'",
            ),
            "adapter",
        ),
        (
            (
                "trainer.lora.rank=4",
                "inference.engine='vllm'",
                "inference.urls=['http://a']",
                "inference.transfer='nccl'",
            ),
            "full",
        ),
    ],
)
def test_the_config_resolves_what_is_published(tmp_path: Path, overrides: tuple[str, ...], published: str) -> None:
    config = load_config(write_config(tmp_path, GOOD), overrides).config
    assert config.inference.publish == published


def test_the_policy_server_queues_a_request_of_every_episode_in_flight(tmp_path: Path) -> None:
    path = write_config(tmp_path, GOOD)
    many = ("gate.max_groups_in_flight=1250", "rollout.completions_per_prompt=8", "rollout.oversample=2")
    assert load_config(path, many).config.inference.max_queued == 12_500
    assert load_config(path).config.inference.max_queued == 4096


def test_a_queue_set_too_short_for_the_episodes_in_flight_is_a_fault(tmp_path: Path) -> None:
    many = ("gate.max_groups_in_flight=1250", "rollout.completions_per_prompt=8", "inference.max_running=100")
    faults = faults_of(tmp_path, GOOD, (*many, "inference.max_queued=4096"))
    assert "10000 episodes" in faults["inference.max_queued"]
    assert "4196 requests" in faults["inference.max_queued"]
    enough = (*many, "inference.max_queued=9900")
    assert load_config(write_config(tmp_path, GOOD), enough).config.inference.max_queued == 9900


def test_publishing_adapters_needs_lora_and_a_supporting_transport(tmp_path: Path) -> None:
    assert "trainer.lora" in faults_of(tmp_path, GOOD, ("inference.publish='adapter'",))["inference.publish"]
    nccl = (
        "trainer.lora.rank=4",
        "inference.publish='adapter'",
        "inference.engine='vllm'",
        "inference.transfer='nccl'",
    )
    assert "nccl" in faults_of(tmp_path, GOOD, (*nccl, "inference.urls=['http://a']"))["inference.publish"]
    experts = ("trainer.lora.experts=true", "inference.publish='adapter'")
    assert "cannot adapt experts" in faults_of(tmp_path, GOOD, experts)["inference.publish"]


def test_a_transport_that_is_gone_names_its_replacement(tmp_path: Path) -> None:
    assert "use 'pull'" in faults_of(tmp_path, GOOD, ("inference.transfer='gloo'",))["inference.transfer"]


def test_settings_that_the_gate_counts_with_cannot_change_on_resume(tmp_path: Path) -> None:
    parts = ["gate.batch_policy=parts", "rollout.completions_per_prompt=8"]
    old = load_config(write_config(tmp_path, GOOD), parts).config
    larger = load_config(write_config(tmp_path, GOOD), [*parts[:1], "rollout.completions_per_prompt=16"]).config
    with pytest.raises(ConfigError, match=r"rollout\.completions_per_prompt: is 16 here and was 8"):
        check_resume(old, larger, source="run")
    later = load_config(write_config(tmp_path, GOOD), [*parts, "rollout.quorum=3"]).config
    with pytest.raises(ConfigError, match=r"rollout\.quorum"):
        check_resume(old, later, source="run")
    whole = load_config(write_config(tmp_path, GOOD), [*parts, "gate.admission_share=whole"]).config
    with pytest.raises(ConfigError, match=r"gate\.admission_share"):
        check_resume(old, whole, source="run")


def test_other_sections_follow_the_advantage_of_the_run(tmp_path: Path) -> None:
    (tmp_path / "my_rewards.py").write_text("def right(case):\n    return 1.0\n", encoding="utf-8")
    path = write_config(tmp_path, GOOD)
    function = 'rollout.rewards.functions.right={path = "my_rewards:right", weight = 0.5}'
    gdpo = load_config(path, (function, "trainer.advantage=gdpo")).config
    assert gdpo.trainer.reward_weights == {"right": 0.5, "environment": 0.0}
    assert (gdpo.gate.batch_policy, gdpo.rollout.turn_credit) == (BatchPolicy.TRIM, None)
    assert gdpo.rollout.score_credit == ("right",), "the environment has no weight"
    ranked = 'rollout.rewards.functions.ranked={path = "my_rewards:right", GROUP = true}'
    whole = load_config(path, (ranked.replace("GROUP", "whole_group"),)).config
    assert whole.gate.batch_policy is BatchPolicy.TRIM, "its default"
    assert load_config(path, (ranked.replace("GROUP", "group"),)).config.gate.batch_policy is BatchPolicy.PARTS
    faults = faults_of(tmp_path, GOOD, (ranked.replace("GROUP", "whole_group"), "gate.batch_policy=parts"))
    assert "set group = true if" in faults["rollout.rewards.functions.ranked.whole_group"]
    unknown = faults_of(tmp_path, GOOD, ('rollout.rewards.functions.ranked={path = "pass_at_3"}',))
    assert "pass_at_2" in unknown["rollout.rewards.functions.ranked.path"]
    alone = (ranked.replace("GROUP", "group"), "rollout.completions_per_prompt=1", "trainer.advantage=reinforce_pp")
    assert "nothing to compare" in str(faults_of(tmp_path, GOOD, alone))
    own = load_config(path, (function, "trainer.advantage=gdpo", "trainer.reward_weights={right = 2.0}")).config
    assert own.trainer.reward_weights == {"right": 2.0, "environment": 0.0}
    recorded = function.replace("right=", "seen=").replace("0.5", "0.0")
    several = load_config(path, (function, recorded, "trainer.advantage=gdpo", "trainer.reward_weights={right = 2.0}"))
    assert several.config.trainer.reward_weights == {"right": 2.0, "seen": 0.0, "environment": 0.0}
    faults = faults_of(tmp_path, GOOD, (function, "trainer.advantage=gdpo", "trainer.reward_weights={rihgt = 2.0}"))
    assert "'rihgt' is no reward function" in faults["trainer.reward_weights"]
    assert "did you mean 'right'?" in faults["trainer.reward_weights"]
    turns = load_config(path, ("trainer.advantage=turn_rloo",)).config
    assert (turns.gate.batch_policy, turns.rollout.turn_credit) == (BatchPolicy.TRIM, "rewards")
    later = load_config(path, ("trainer.advantage=turn_rloo", "trainer.turn_discount=0.9")).config
    states = load_config(path, ("trainer.advantage=gigpo",)).config
    assert (later.rollout.turn_credit, states.rollout.turn_credit) == ("lengths", "states")
    assert load_config(path).config.rollout.turn_credit is None
    assert load_config(path).config.rollout.score_credit is None
    for name in ("gigpo", "turn_rloo"):
        faults = faults_of(tmp_path, GOOD, (f"trainer.advantage={name}", "gate.batch_policy=parts"))
        assert "compares the samples of whole groups" in faults["trainer.advantage"]
    faults = faults_of(tmp_path, GOOD, ("trainer.turn_discount=0.9",))
    assert "'group' does not read turn_discount" in faults["trainer.turn_discount"]


def test_router_replay_turns_on_the_record_of_the_engine_and_needs_one_that_has_it(tmp_path: Path) -> None:
    replayed = GOOD.replace("max_steps = 3", "max_steps = 3\nrouter_replay = true")
    assert load_config(write_config(tmp_path, replayed)).config.inference.record_routes
    assert not load_config(write_config(tmp_path, GOOD)).config.inference.record_routes
    scripted = faults_of(tmp_path, replayed + '[inference]\nengine = "scripted"\n')
    assert "engine = 'scripted' does not report them" in scripted["trainer.router_replay"]
    unread = faults_of(tmp_path, GOOD + "[inference]\nrecord_routes = true\n")
    assert "nothing reads the routes" in unread["inference.record_routes"]
