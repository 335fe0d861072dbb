"""Errors of user code, as they are shown to the user."""

import json
from pathlib import Path
from typing import Any

import pytest

from rollbook.contracts.errors import EpisodeError, fenced
from rollbook.contracts.plugin import PluginError, extend_search_path, load_plugin
from rollbook.contracts.user_errors import describe_error, did_you_mean, visible


def fails(row: dict[str, Any]) -> Any:
    return row["tier"]


def described(function: Any, *args: Any) -> str:
    try:
        function(*args)
    except Exception as error:
        return describe_error(error)
    raise AssertionError("it did not raise")


def test_the_description_names_the_line_of_the_users_code() -> None:
    first, *frames = described(fails, {}).splitlines()
    assert first == "KeyError: 'tier'"
    assert frames[-2:] == [
        f'  File "{__file__}", line {fails.__code__.co_firstlineno + 1}, in fails',
        '    return row["tier"]',
    ]


def test_an_error_in_a_library_names_the_users_line_first_and_the_library_last() -> None:
    lines = described(lambda: json.loads("{")).splitlines()
    assert lines[0].startswith("JSONDecodeError")
    assert __file__ in lines[-3]
    assert lines[-1].startswith("  raised in json/decoder.py, line ")


def test_only_the_innermost_frames_of_a_deep_error_are_shown() -> None:
    def deep(depth: int) -> int:
        return deep(depth - 1) if depth else 1 // 0

    text = described(deep, 20)
    assert "18 more frames" in text
    assert text.count("File") == 4


def test_fenced_user_code_keeps_its_traceback_in_the_message() -> None:
    with (
        pytest.raises(EpisodeError, match=r"env coin.reset raised KeyError: 'tier'\n(.*\n)*.*in fails"),
        fenced("env coin.reset"),
    ):
        fails({})


def test_an_import_error_names_the_line_in_the_users_module(tmp_path: Path) -> None:
    (tmp_path / "broken_at_import.py").write_text("x = 1\ny = undefined_name\n")
    (tmp_path / "broken_syntax.py").write_text("x = 1\ndef f(:\n")
    extend_search_path([tmp_path])
    with pytest.raises(PluginError, match=r'NameError(.*\n)*.*broken_at_import.py", line 2'):
        load_plugin("broken_at_import:f", setting="x")
    with pytest.raises(PluginError, match=r'SyntaxError(.*\n)*.*broken_syntax.py", line 2\n    def f\(:'):
        load_plugin("broken_syntax:f", setting="x")


def test_a_suggestion_is_made_for_similar_names_only() -> None:
    assert did_you_mean("max_stps", ["max_steps", "lr"]) == "; did you mean 'max_steps'?"
    assert did_you_mean("Reward", ["reward"]) == "; did you mean 'reward'?"
    assert did_you_mean("zzz", ["max_steps"]) == ""


def test_control_characters_of_ids_and_model_text_are_shown_as_escapes() -> None:
    hostile = "a\x1b[2J\x9b\u202eb\x7f\r\n\tc é 😀"
    assert visible(hostile) == "a\\x1b[2J\\x9b\\u202eb\\x7f\\r\\n\\tc é 😀"
    assert visible(hostile, is_line=False) == "a\\x1b[2J\\x9b\\u202eb\\x7f\\r\n\tc é 😀"
