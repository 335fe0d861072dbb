"""Loading of tasks: permanent ids, and errors that name the row."""

import csv
import json
from pathlib import Path

import datasets
import pyarrow
import pyarrow.parquet
import pytest
from pydantic import ValidationError

from rollbook.contracts.errors import RunError
from rollbook.tasks.config import TasksConfig
from rollbook.tasks.dataset import content_digest, load_tasks


def write_rows(path: Path, rows: list[object]) -> None:
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n")


def test_rows_keep_their_ids_and_rows_without_one_get_a_digest(tmp_path: Path) -> None:
    write_rows(tmp_path / "t.jsonl", [{"id": "a", "x": 1}, {"id": 7}, {"x": 2, "y": 3}])
    tasks = load_tasks(TasksConfig(source="t.jsonl"), base_dir=tmp_path)
    assert [task.id for task in tasks] == ["a", "7", content_digest({"y": 3, "x": 2})]
    assert tasks[0].row == {"id": "a", "x": 1}


def test_an_id_survives_edits_of_other_rows_and_the_order_of_keys(tmp_path: Path) -> None:
    write_rows(tmp_path / "before.jsonl", [{"x": 1}, {"x": 2, "y": 3}])
    write_rows(tmp_path / "after.jsonl", [{"y": 3, "x": 2}, {"x": 99}])
    before = load_tasks(TasksConfig(source="before.jsonl"), base_dir=tmp_path)
    after = load_tasks(TasksConfig(source="after.jsonl"), base_dir=tmp_path)
    assert before[1].id == after[0].id


def test_repeated_ids_get_suffixes_that_never_collide(tmp_path: Path) -> None:
    write_rows(tmp_path / "t.jsonl", [{"id": "a"}, {"id": "a#2"}, {"id": "a"}, {"id": "a"}, {"id": "a#2"}])
    tasks = load_tasks(TasksConfig(source="t.jsonl"), base_dir=tmp_path)
    assert [task.id for task in tasks] == ["a", "a#2", "a#3", "a#4", "a#2#2"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{broken", "line 2: not JSON"),
        ("[1, 2]", "line 2: a list"),
        ('{"id": "a@b"}', "line 2: id 'a@b' contains '@'"),
        ('{"id": [1]}', "line 2: field 'id' is [1]"),
        ('{"id": ""}', "line 2: field 'id' is ''"),
        ('{"answer": 123456789012345678901234567890}', "line 2: can't serialize ints"),
        ('{"question": "half a character: \\ud83d"}', "line 2: 'utf-8' codec can't encode"),
    ],
)
def test_a_bad_row_is_named_with_its_line(tmp_path: Path, line: str, message: str) -> None:
    (tmp_path / "t.jsonl").write_text(f'{{"x": 1}}\n{line}\n')
    with pytest.raises(RunError) as raised:
        load_tasks(TasksConfig(source="t.jsonl"), base_dir=tmp_path)
    assert message in str(raised.value)
    assert "t.jsonl" in str(raised.value)


def test_the_error_for_a_missing_or_empty_file_contains_its_path(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=str(tmp_path)):
        load_tasks(TasksConfig(source="missing.jsonl"), base_dir=tmp_path)
    (tmp_path / "empty.jsonl").write_text("\n\n")
    with pytest.raises(RunError, match="no tasks"):
        load_tasks(TasksConfig(source="empty.jsonl"), base_dir=tmp_path)


def test_a_function_in_the_directory_of_the_config_yields_rows(tmp_path: Path) -> None:
    (tmp_path / "tasks_made_here.py").write_text(
        "def numbers(count):\n    for n in range(count):\n        yield {'id': f'n{n}', 'pair': (n, n)}\n"
        "def broken():\n    yield {'x': 1}\n    raise OSError('disk on fire')\n"
        "def odd():\n    yield {'x': object()}\n"
    )
    config = TasksConfig(source="tasks_made_here:numbers", args={"count": 3})
    tasks = load_tasks(config, base_dir=tmp_path)
    assert [task.id for task in tasks] == ["n0", "n1", "n2"]
    assert tasks[1].row["pair"] == [1, 1], "rows are plain JSON, also from a function"
    with pytest.raises(RunError, match="disk on fire"):
        load_tasks(TasksConfig(source="tasks_made_here:broken"), base_dir=tmp_path)
    with pytest.raises(RunError, match="row 0: not plain JSON"):
        load_tasks(TasksConfig(source="tasks_made_here:odd"), base_dir=tmp_path)
    with pytest.raises(RunError, match="has no 'absent'"):
        load_tasks(TasksConfig(source="tasks_made_here:absent"), base_dir=tmp_path)
    with pytest.raises(RunError, match="no module 'tasks_made_nowhere' in "):
        load_tasks(TasksConfig(source="tasks_made_nowhere:x"), base_dir=tmp_path)


def test_a_source_that_is_neither_file_nor_function_is_refused() -> None:
    with pytest.raises(ValidationError, match="no file that ends in"):
        TasksConfig(source="tasks.xml")
    with pytest.raises(ValidationError, match="takes no args"):
        TasksConfig(source="tasks.jsonl", args={"count": 3})


ROWS = [{"problem": f"{n} + {n}?", "solution": str(2 * n), "level": n} for n in range(5)]


def test_csv_and_parquet_have_the_rows_of_jsonl(tmp_path: Path) -> None:
    write_rows(tmp_path / "t.jsonl", list(ROWS))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "t.parquet")
    with (tmp_path / "t.csv").open("w", encoding="utf-8-sig", newline="") as file:
        writer = csv.DictWriter(file, ["problem", "solution", "level"])
        writer.writeheader()
        writer.writerows(ROWS)
    expected = [task.row for task in load_tasks(TasksConfig(source="t.jsonl"), base_dir=tmp_path)]
    assert [task.row for task in load_tasks(TasksConfig(source="t.parquet"), base_dir=tmp_path)] == expected
    # Every value of a CSV file is a text.
    texts = [{name: str(value) for name, value in row.items()} for row in expected]
    assert [task.row for task in load_tasks(TasksConfig(source="t.csv"), base_dir=tmp_path)] == texts


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("t.csv", "a,b\n1,2\n1\n", r"t\.csv, row 2: it does not have one value for each"),
        ("t.csv", 'a,b\n1,"2\n', r"t\.csv, line \d+: not CSV"),
        ("t.parquet", "no parquet", r"cannot read .*t\.parquet"),
    ],
)
def test_a_damaged_file_is_named_with_its_row(tmp_path: Path, name: str, content: str, message: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(RunError, match=message):
        load_tasks(TasksConfig(source=name), base_dir=tmp_path)


def test_a_file_in_another_encoding_is_named_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_bytes('{"question": "tea"}\n{"question": "café"}\n'.encode("latin-1"))
    with pytest.raises(RunError, match=r"t\.jsonl, line 2: not UTF-8 \(byte 0xe9\); convert the file"):
        load_tasks(TasksConfig(source="t.jsonl"), base_dir=tmp_path)


def test_columns_choose_and_rename_and_the_limit_takes_the_first_rows(tmp_path: Path) -> None:
    write_rows(tmp_path / "t.jsonl", list(ROWS))
    config = TasksConfig(source="t.jsonl", columns={"question": "problem", "id": "level"}, limit=2)
    tasks = load_tasks(config, base_dir=tmp_path)
    assert [(task.id, task.row) for task in tasks] == [
        ("0", {"question": "0 + 0?", "id": 0}),
        ("1", {"question": "1 + 1?", "id": 1}),
    ]
    with pytest.raises(RunError, match=r"no column 'problems' .* did you mean 'problem'"):
        load_tasks(TasksConfig(source="t.jsonl", columns={"question": "problems"}), base_dir=tmp_path)


def test_one_split_saved_to_disk_is_not_read_as_another(tmp_path: Path) -> None:
    rows = [{"question": "2 + 2?"}, {"question": "3 + 3?"}]
    datasets.Dataset.from_list(rows, split="train").save_to_disk(str(tmp_path / "train"))
    datasets.Dataset.from_list(rows).save_to_disk(str(tmp_path / "unnamed"))
    for config in (
        TasksConfig(source="hf:train", split="train"),
        TasksConfig(source="hf:train"),
        TasksConfig(source="hf:unnamed"),
    ):
        assert len(load_tasks(config, base_dir=tmp_path)) == 2
    with pytest.raises(RunError, match="it holds the split 'train'"):
        load_tasks(TasksConfig(source="hf:train", split="test"), base_dir=tmp_path)
    with pytest.raises(RunError, match="it holds one split without a name"):
        load_tasks(TasksConfig(source="hf:unnamed", split="test"), base_dir=tmp_path)
