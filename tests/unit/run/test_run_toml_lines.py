"""Lines of keys in TOML files."""

from typing import Any

import tomli_w
from hypothesis import given
from hypothesis import strategies as st

from rollbook.run.config.toml_lines import key_lines, line_of

keys = st.text("abc_-9.é \"'", min_size=1, max_size=5).filter(lambda key: "." not in key)
leaves = st.one_of(
    st.integers(),
    st.text("a=[]{}#\n\"'\\,", max_size=8),
    st.booleans(),
    st.lists(st.text("a=,[", max_size=3), max_size=3),
)
tables = st.recursive(
    st.dictionaries(keys, leaves, max_size=3),
    lambda inner: st.dictionaries(keys, leaves | inner, max_size=3),
    max_leaves=12,
)


def paths(table: dict[str, Any], prefix: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    found = []
    for key, value in table.items():
        found.append((*prefix, key))
        if isinstance(value, dict):
            found += paths(value, (*prefix, key))
    return found


@given(tables, st.booleans())
def test_the_line_of_a_key_contains_the_key(table: dict[str, Any], multiline: bool) -> None:
    text = tomli_w.dumps(table, multiline_strings=multiline)
    lines, rows = key_lines(text), text.split("\n")
    for path in paths(table):
        row = rows[lines[".".join(path)] - 1]
        # tomli_w writes keys bare or as basic strings.
        assert path[-1] in row or path[-1].replace('"', '\\"') in row


def test_a_setting_that_the_file_does_not_contain_has_the_line_of_its_table() -> None:
    lines = key_lines('[run]\nname = "x"\n\n[rollout.rewards.functions.a]\npath = "m:f"\n')
    assert line_of("rollout.rewards.functions.a.weight", lines) == 4
    assert line_of("rollout.max_turns", lines) == 4
    assert line_of("trainer.lr", lines) is None


def test_values_over_several_lines_and_lists_of_tables_are_followed() -> None:
    lines = key_lines('a = [\n  "x = 1",\n]\nb = {c = 1, d = 2}\n[[t]]\nk = 1\n[[t]]\nk = """\n[no]\n"""\nz = 3\n')
    assert lines == {
        "a": 1,
        "b": 4,
        "b.c": 4,
        "b.d": 4,
        "t": 5,
        "t.0": 5,
        "t.0.k": 6,
        "t.1": 7,
        "t.1.k": 8,
        "t.1.z": 11,
    }
