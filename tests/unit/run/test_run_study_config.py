"""The file of a study: its cells, and the faults that are found before anything starts."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollbook.run.config.run import ConfigError, dump_toml, load_config, override_table
from rollbook.run.config.study import load_study, toml_value
from rollbook.run.directory import RunDirectory
from tests.parts.run.small import CONFIG, EXAMPLE

EVALUATION = '\n[evaluation]\nevery_steps = 5\npolicy = "shared"\n'


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("study")
    (folder / "run.toml").write_text(CONFIG + EVALUATION, encoding="utf-8")
    for module in EXAMPLE.glob("*.py"):
        (folder / module.name).write_text(module.read_text(encoding="utf-8"), encoding="utf-8")
    return folder


def written(home: Path, text: str, *, head: str = 'config = "run.toml"') -> Path:
    path = home / "study.toml"
    path.write_text(f"[study]\n{head}\n{text}", encoding="utf-8")
    return path


def faults(home: Path, text: str, *, head: str = 'config = "run.toml"') -> str:
    with pytest.raises(ConfigError) as caught:
        load_study(written(home, text, head=head))
    return str(caught.value)


def test_every_combination_is_a_cell_and_all_cells_of_a_seed_come_first(home: Path) -> None:
    study = load_study(
        written(
            home,
            """
[settings]
trainer.max_steps = 4
[grid]
gate.max_head_offpolicy_versions = [0, 2]
[[grid.recipe]]
name = "plain"
trainer.loss = "grpo"
[[grid.recipe]]
name = "to the sampler"
trainer = { loss = "dapo", old_logprobs = "engine" }
""",
            head='config = "run.toml"\nseeds = [4, 7]',
        )
    )
    names = [
        "max_head_offpolicy_versions=0,plain",
        "max_head_offpolicy_versions=0,to the sampler",
        "max_head_offpolicy_versions=2,plain",
        "max_head_offpolicy_versions=2,to the sampler",
    ]
    assert [(cell.name, cell.seed) for cell in study.cells] == [(name, seed) for seed in (4, 7) for name in names]
    assert study.config is not None
    config = load_config(study.config, study.cells[-1].overrides).config
    assert (config.run.seed, config.trainer.max_steps, config.trainer.loss) == (7, 4, "dapo")
    assert (config.trainer.old_logprobs, config.gate.max_head_offpolicy_versions) == ("engine", 2)
    assert study.cells[-1].folder == "max_head_offpolicy_versions=2_to_the_sampler/seed-7"


@given(value=st.one_of(st.text(), st.floats(allow_nan=False), st.booleans(), st.lists(st.text()), st.dates()))
def test_a_setting_reaches_the_run_unchanged(value: object) -> None:
    table: dict[str, Any] = {}
    text = f"rollout.settings.mine={toml_value(value)}"
    assert "\n" not in text
    assert override_table(table, text) is None
    assert table["rollout"]["settings"]["mine"] == value


def recorded(home: Path, name: str) -> Path:
    """A run directory with its resolved config, without a record."""
    directory = RunDirectory(home / name)
    directory.prepare()
    directory.write_manifest(name=name, source_dir=home)
    config = load_config(home / "run.toml", ["trainer.loss=gspo", "trainer.clip_low=0.05"]).config
    directory.config_file.write_text(dump_toml(config), encoding="utf-8")
    return directory.path


def test_recorded_runs_are_replayed_with_their_settings_and_with_every_combination(tmp_path: Path, home: Path) -> None:
    for module in home.glob("*.*"):
        (tmp_path / module.name).write_bytes(module.read_bytes())
    runs = [recorded(tmp_path, "first"), recorded(tmp_path, "second.run")]
    grid = '[grid]\ntrainer.advantage = ["group", "turn_rloo"]\n'
    study = load_study(written(tmp_path, grid, head='replay = ["first", "second.run"]'), ["trainer.loss=grpo"])
    names = ["as recorded", "advantage=group", "advantage=turn_rloo"]
    assert [(cell.name, cell.replayed) for cell in study.cells] == [(name, run) for run in runs for name in names]
    assert study.cells[0].overrides == ()
    assert set(study.cells[-1].overrides) == {"trainer.loss=grpo", 'trainer.advantage="turn_rloo"'}
    assert len({cell.folder for cell in study.cells}) == 6
    alone = load_study(written(tmp_path, "", head='replay = ["first"]'))
    assert [cell.name for cell in alone.cells] == ["as recorded"]

    for text, head, fault in (
        ("", 'replay = ["first"]\nconfig = "run.toml"', "set config, to train runs, or replay"),
        ("", 'name = "x"', "set config, to train runs, or replay"),
        ("", 'replay = ["first"]\nseeds = [1]', "a replay does not read seeds: remove it"),
        ("", 'replay = ["third"]', f"no run directory: {tmp_path / 'third'}"),
        ("[grid]\ngate.groups_per_step = [1]", 'replay = ["first"]', "only settings of [trainer] can be changed"),
        ('[grid]\ntrainer.loss = ["grop"]', 'replay = ["first"]', "unknown loss 'grop'"),
    ):
        assert fault in faults(tmp_path, text, head=head)


def test_excluded_combinations_are_left_out(home: Path) -> None:
    study = load_study(
        written(
            home,
            """
[grid]
gate.max_head_offpolicy_versions = [0, 1]
recipe = [{ name = "a" }, { name = "b" }, { name = "c" }]
[[exclude]]
gate.max_head_offpolicy_versions = 0
recipe = ["b", "c"]
""",
            head='config = "run.toml"\nseeds = [0]',
        )
    )
    assert [tuple(cell.labels.values()) for cell in study.cells] == [
        ("max_head_offpolicy_versions=0", "a"),
        *(("max_head_offpolicy_versions=1", name) for name in "abc"),
    ]


def test_a_study_without_a_grid_repeats_one_config_with_several_seeds(home: Path) -> None:
    study = load_study(written(home, ""))
    assert [(cell.name, cell.seed) for cell in study.cells] == [("base", 0), ("base", 1), ("base", 2)]


def test_a_fault_of_a_cell_is_reported_once_with_the_cells_that_have_it(home: Path) -> None:
    text = faults(
        home,
        """
[grid]
trainer.old_logprobs = ["snapshot", "engine"]
trainer.correction = ["none", "tis"]
trainer.lr = [1e-3, 2e-3]
""",
    )
    assert text.count("a correction would apply it twice") == 1
    assert "cell old_logprobs=engine,correction=tis,lr=0.001; old_logprobs=engine,correction=tis,lr=0.002" in text


def test_cells_must_be_evaluated_on_the_same_held_out_tasks(home: Path) -> None:
    assert "different held-out tasks" in faults(home, "[grid]\nevaluation.max_tasks = [4, 8]\n")
    # Without its own tasks, the evaluation plays the tasks that are trained.
    assert "different held-out tasks" in faults(home, "[grid]\ntasks.args.high = [5, 7]\n")


def test_a_study_of_held_out_tasks_needs_evaluations(home: Path) -> None:
    (home / "bare.toml").write_text(CONFIG, encoding="utf-8")
    head = 'config = "bare.toml"'
    assert "needs evaluation.every_steps" in faults(home, "", head=head)
    assert load_study(written(home, "", head=f'{head}\nmeasure = "reward"')).measure == "reward"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[grid]\ntrainer.lr = 1e-3\n", "grid.trainer.lr: must be a list"),
        ("[grid]\nlr = [1e-3]\n", "is not section.field"),
        ('[grid]\nrecipe = [{ trainer.loss = "grpo" }]\n', "each table needs a name"),
        ('[grid]\nrecipe = [{ name = "a b" }, { name = "a?b" }]\n', "several values named a_b"),
        ("[settings]\nrun.seed = 3\n", "set study.seeds instead"),
        ("[grid]\ntrainer.los = ['grpo']\n", "unknown field; did you mean 'loss'?"),
        ("[grd]\n", "grd"),
        (
            "[grid]\ntrainer.lr = [1e-3]\n[[exclude]]\ntrainer.loss = 'grpo'\n",
            "is no axis of the grid; axes are trainer.lr",
        ),
        ("[grid]\ntrainer.lr = [1e-3]\n[[exclude]]\ntrainer.lr = 2e-3\n", "has no value 0.002"),
        ("[grid]\ntrainer.lr = [1e-3]\n[[exclude]]\ntrainer.lr = 1e-3\n", "leaves no cell"),
    ],
)
def test_a_wrong_study_is_refused_with_its_cause(home: Path, text: str, expected: str) -> None:
    assert expected in faults(home, text)


def test_missing_files_and_repeated_seeds_are_refused(home: Path) -> None:
    assert "study.config: no such file" in faults(home, "", head='config = "other.toml"')
    assert "different numbers" in faults(home, "", head='config = "run.toml"\nseeds = [1, 1]')
