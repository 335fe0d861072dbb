"""The user's modules are copied into the run, and used by evaluation and replay when the present code differs."""

import json
from pathlib import Path

import pytest

from rollbook.commands.record.evaluate import evaluation_request
from rollbook.run.config.run import LoadedConfig, RunConfig
from rollbook.run.directory import RunDirectory, write_json
from rollbook.run.user_modules import copy_modules, module_copies, recorded_modules, user_modules

FILES = {
    "rewards.py": "import json\nfrom helpers.text import last_number\nimport unknown_library\n",
    "helpers/__init__.py": "",
    "helpers/text.py": "from . import numbers\nfrom .deep.more import x\n",
    "helpers/numbers.py": "",
    "helpers/deep/more.py": "",
    "my_rollout.py": "def make_rollout(setup): ...\n",
    "unused.py": "",
}
COPIED = sorted(FILES.keys() - {"unused.py"})


@pytest.fixture
def project(tmp_path: Path) -> Path:
    source = tmp_path / "project"
    for name, text in FILES.items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(text, encoding="utf-8")
    return source


def loaded(project: Path) -> LoadedConfig:
    config = RunConfig.model_validate(
        {
            "run": {"name": "run"},
            "model": {"path": "model"},
            "tasks": {"source": "tasks.jsonl"},
            "rollout": {
                "function": "my_rollout",
                "rewards": {"functions": {"correct": {"path": "rewards:correct"}}},
            },
        }
    )
    return LoadedConfig(config, project, (project,))


def run_of(project: Path, tmp_path: Path) -> RunDirectory:
    directory = RunDirectory(tmp_path / "run")
    directory.prepare()
    directory.write_manifest(name="run", source_dir=project, search_path=[project])
    write_json(directory.model_file, {"path": "model"})
    copy_modules(loaded(project), directory)
    return directory


def test_modules_that_the_config_names_and_those_they_import_are_copied(project: Path, tmp_path: Path) -> None:
    assert sorted(user_modules(loaded(project), ignored=tmp_path / "run")) == COPIED
    directory = run_of(project, tmp_path)
    [copy] = module_copies(directory)
    for name in COPIED:
        assert (copy.folder(directory) / name).read_text(encoding="utf-8") == FILES[name]
    assert recorded_modules(directory) == ([copy.folder(directory)], None)


def test_a_resume_with_the_same_code_makes_no_other_copy_and_with_other_code_does(
    project: Path, tmp_path: Path
) -> None:
    directory = run_of(project, tmp_path)
    copy_modules(loaded(project), directory)
    assert len(module_copies(directory)) == 1
    (project / "helpers" / "numbers.py").write_text("ONE = 1\n", encoding="utf-8")
    copy_modules(loaded(project), directory)
    first, second = module_copies(directory)
    assert (first.folder(directory) / "helpers/numbers.py").read_text(encoding="utf-8") == ""
    assert (second.folder(directory) / "helpers/numbers.py").read_text(encoding="utf-8") == "ONE = 1\n"


def test_an_evaluation_uses_the_copy_and_says_that_the_present_code_differs(
    project: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = run_of(project, tmp_path)
    [copy] = module_copies(directory)
    (project / "rewards.py").write_text("def correct(case): return 0\n", encoding="utf-8")
    (project / "my_rollout.py").unlink()
    request = evaluation_request(directory.path, config=None, step=0, overrides=())
    assert request.modules == [str(copy.folder(directory))]
    shown = " ".join(capsys.readouterr().err.split())
    assert "rewards.py changed since the run was trained; the run's own copy is used" in shown
    assert "my_rollout.py" in shown
    own = evaluation_request(directory.path, config=project / "run.toml", step=0, overrides=())
    assert own.modules == []


def test_a_run_without_copies_uses_the_present_code(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    assert recorded_modules(directory) == ([], None)
    directory.modules_file.write_text(json.dumps([{"digest": "gone", "files": {}}]), encoding="utf-8")
    assert recorded_modules(directory) == ([], None)
