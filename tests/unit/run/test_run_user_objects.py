"""Objects that are passed to `rollbook.train`: by name where possible, by value otherwise."""

import functools
import linecache
import subprocess
import sys
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rollbook.contracts.plugin import extend_search_path, load_plugin
from rollbook.envs.builtin.arithmetic import Arithmetic
from rollbook.run.config.run import ConfigError, RunConfig
from rollbook.run.config.source import place, read_source, with_references
from rollbook.run.user_objects import UserObjectError, reference_to, reference_to_rows

BONUS = 0.5
LOCK = threading.Lock()


def module_reward(case: Any) -> float:
    return BONUS


def loaded_elsewhere(reference: str, directory: Path, expression: str) -> str:
    """The value of an expression about the object `it`, in a process that has only the files of the directory."""
    code = (
        "import sys\n"
        "from rollbook.contracts.plugin import extend_search_path, load_plugin\n"
        "extend_search_path([sys.argv[1]])\n"
        "it = load_plugin(sys.argv[2], setting='test')\n"
        f"print({expression})"
    )
    command = [sys.executable, "-c", code, str(directory), reference]
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=directory).stdout.strip()


@pytest.fixture
def cell() -> Iterator[Callable[[str], types.ModuleType]]:
    """Executes text as a notebook cell: its file does not exist, its lines are known, and its module cannot be imported."""
    files: list[str] = []

    def execute(text: str) -> types.ModuleType:
        name = f"/tmp/kernel_{len(files)}/cell.py"
        files.append(name)
        linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
        module = types.ModuleType("__main__")
        exec(compile(text, name, "exec"), vars(module))
        return module

    yield execute
    for name in files:
        linecache.cache.pop(name, None)


def test_an_importable_object_is_passed_by_its_name(tmp_path: Path) -> None:
    found = reference_to(Arithmetic, setting="env.name", directory=tmp_path)
    assert found == "rollbook.envs.builtin.arithmetic:Arithmetic"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("value", "expression", "expected"),
    [
        (lambda case: BONUS * 2, "it(None)", "1.0"),
        (functools.partial(max, 3), "it(7)", "7"),
    ],
)
def test_other_objects_are_pickled_and_load_in_another_process(
    tmp_path: Path, value: Any, expression: str, expected: str
) -> None:
    reference = reference_to(value, setting="rewards", directory=tmp_path)
    assert loaded_elsewhere(reference, tmp_path, expression) == expected


def test_a_class_of_a_notebook_cell_loads_in_another_process(
    tmp_path: Path, cell: Callable[[str], types.ModuleType]
) -> None:
    text = "LIMIT = 3\nclass Game:\n    def step(self, action):\n        return LIMIT + action\n"
    reference = reference_to(cell(text).Game, setting="env.name", directory=tmp_path)
    assert loaded_elsewhere(reference, tmp_path, "isinstance(it, type), it().step(4)") == "True 7"


def test_an_unchanged_cell_has_the_same_reference_in_another_session(
    tmp_path: Path, cell: Callable[[str], types.ModuleType]
) -> None:
    text = "def score(case):\n    return 1.0\n"
    first, second, other = (cell(source).score for source in (text, text, text.replace("1.0", "2.0")))
    assert first.__code__.co_filename != second.__code__.co_filename
    references = [reference_to(score, setting="rewards", directory=tmp_path) for score in (first, second, other)]
    assert references[0] == references[1] != references[2]


def test_a_traceback_shows_the_line_of_the_notebook_cell(
    tmp_path: Path, cell: Callable[[str], types.ModuleType]
) -> None:
    text = "def score(case):\n    return case['answer'] / 0\n"
    reference = reference_to(cell(text).score, setting="rewards", directory=tmp_path)
    code = (
        "import sys, traceback\n"
        "from rollbook.contracts.plugin import extend_search_path, load_plugin\n"
        "extend_search_path([sys.argv[1]])\n"
        "try:\n    load_plugin(sys.argv[2], setting='test')({'answer': 1})\n"
        "except ZeroDivisionError:\n    traceback.print_exc(file=sys.stdout)"
    )
    command = [sys.executable, "-c", code, str(tmp_path), reference]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "line 2, in score\n    return case['answer'] / 0" in shown


def test_what_cannot_be_sent_is_named_with_the_names_that_lead_to_it(tmp_path: Path) -> None:
    client = types.SimpleNamespace(retries=3, lock=LOCK)

    def score(case: Any) -> float:
        return float(client.retries)

    with pytest.raises(UserObjectError, match=r"rewards: .*score .*score → client → lock is a _thread\.lock") as raised:
        reference_to(score, setting="rewards", directory=tmp_path)
    assert "test_run_user_objects.py, line" in str(raised.value)
    assert list(tmp_path.iterdir()) == []


def test_tasks_are_stored_as_rows(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"word": "größer", "n": 1}, {"word": "b", "n": [1, 2]}]
    reference = reference_to_rows(rows, setting="tasks.source", directory=tmp_path)
    assert reference == reference_to_rows(rows, setting="tasks.source", directory=tmp_path)
    extend_search_path([tmp_path])
    assert list(load_plugin(reference, setting="tasks.source")()) == rows


def test_a_row_that_is_not_json_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserObjectError, match=r"tasks\.source: row 1 is not plain JSON"):
        reference_to_rows([{"a": 1}, {"a": {1, 2}}], setting="tasks.source", directory=tmp_path)


def test_objects_in_any_place_of_a_dict_become_references(tmp_path: Path) -> None:
    def tasks(count: int) -> Iterator[dict[str, int]]:
        yield from ({"n": number} for number in range(count))

    given: dict[str, Any] = {
        "env": {"name": Arithmetic},
        "tasks": {"source": tasks, "args": {"count": 2}},
        "rollout": {"settings": {"agent": module_reward}},
    }
    table = with_references(given, tmp_path)
    assert table["env"] == {"name": "rollbook.envs.builtin.arithmetic:Arithmetic"}
    assert table["rollout"]["settings"]["agent"] == f"{__name__}:module_reward"
    extend_search_path([tmp_path])
    assert list(load_plugin(table["tasks"]["source"], setting="tasks.source")()) == [{"n": 0}, {"n": 1}]
    assert "args" not in table["tasks"], "they were used when the function was called"
    assert given["tasks"]["source"] is tasks, "the dict of the caller is not changed"


def test_a_task_source_of_another_type_is_a_fault_of_the_config(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tasks\.source: is a int; pass rows"):
        with_references({"tasks": {"source": 3}}, tmp_path)


def test_only_the_fields_that_were_set_are_taken_from_a_run_config() -> None:
    config = RunConfig.model_validate(
        {"run": {"seed": 7}, "model": {"path": "m"}, "tasks": {"source": "t.jsonl"}, "trainer": {"max_steps": 3}}
    )
    table = read_source(config).table
    assert table == {
        "run": {"seed": 7},
        "model": {"path": "m"},
        "tasks": {"source": "t.jsonl"},
        "trainer": {"max_steps": 3},
    }


def test_a_value_is_placed_into_a_section_that_does_not_exist_yet() -> None:
    table: dict[str, Any] = {"trainer": {"lr": 1.0}}
    place(table, "rollout.rewards.functions.score.path", "m:score")
    place(table, "trainer.loss", "cispo")
    assert table == {
        "trainer": {"lr": 1.0, "loss": "cispo"},
        "rollout": {"rewards": {"functions": {"score": {"path": "m:score"}}}},
    }
