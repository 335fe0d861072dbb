"""User code named by `module:attribute`: each fault has an error that says what is wrong, also without importing the module."""

import logging
import re
import subprocess
import sys
from collections.abc import Iterator
from enum import Enum
from pathlib import Path

import pytest

from rollbook.contracts.plugin import (
    EXTRAS,
    PluginError,
    extend_search_path,
    hide_warnings_of_torchao,
    install_command,
    load_plugin,
    plugin_fault,
)

REPOSITORY = Path(__file__).parents[3]


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Holds user modules; the search path, `sys.path` and `sys.modules` are restored."""
    monkeypatch.setattr("rollbook.contracts.plugin._search_path", [])
    (tmp_path / "plugin_good.py").write_text("def f():\n    return 1\nnumber = 3\n")
    (tmp_path / "plugin_broken.py").write_text("1 / 0\n")
    (tmp_path / "plugin_needs.py").write_text("import not_installed_here\n\ndef f(): ...\n")
    (tmp_path / "plugin_package").mkdir()
    (tmp_path / "plugin_package" / "__init__.py").write_text("raise SystemExit('imported')\n")
    (tmp_path / "plugin_package" / "inner.py").write_text("if True:\n    from json import dumps as f\n")
    saved_path, saved_modules = list(sys.path), set(sys.modules)
    yield tmp_path
    sys.path[:] = saved_path
    for name in set(sys.modules) - saved_modules:
        del sys.modules[name]


@pytest.mark.parametrize(
    ("path", "fault"),
    [
        ("plugin_absent:f", "no module 'plugin_absent' in {directory} or the installed packages"),
        ("plugin_good:absent", "module plugin_good has no 'absent' (it defines f); define it"),
        ("plugin_good:number", "number is not callable, it is of type int"),
        ("plugin_good", "does not have the form module:attribute"),
        (":f", "does not have the form module:attribute"),
        ("plugin_broken:f", "importing it raised ZeroDivisionError: division by zero"),
        ("plugin_needs:f", "plugin_needs imports 'not_installed_here', which is not installed"),
    ],
)
def test_a_plugin_that_cannot_be_loaded_says_what_is_wrong(directory: Path, path: str, fault: str) -> None:
    extend_search_path([directory])
    with pytest.raises(PluginError) as raised:
        load_plugin(path, setting="trainer.loss")
    assert str(raised.value).startswith(f"trainer.loss = {path!r}")
    assert fault.format(directory=directory) in str(raised.value)


def test_a_plugin_is_loaded_from_the_added_directory(directory: Path) -> None:
    extend_search_path([directory])
    assert load_plugin("plugin_good:f", setting="x")() == 1
    assert load_plugin("plugin_good", setting="x", default="f")() == 1


@pytest.mark.parametrize(
    ("path", "fault"),
    [
        ("plugin_absent:f", "no module 'plugin_absent' in {directory} or"),
        ("plugin_package.absent:f", "no module 'plugin_package.absent'"),
        ("plugin_good.inner:f", "no module 'plugin_good.inner'"),
        ("plugin_package.inner:g", "module plugin_package.inner has no 'g' (it defines f)"),
        ("plugin_good", "does not have the form module:attribute"),
        ("plugin_unreadable:f", "cannot be read as Python"),
    ],
)
def test_a_fault_is_found_without_importing(directory: Path, path: str, fault: str) -> None:
    (directory / "plugin_unreadable.py").write_text("def f(:\n")
    found = plugin_fault(path, setting="x", search_path=[directory])
    assert found is not None
    assert fault.format(directory=directory) in found
    assert not any(name.startswith("plugin_") for name in sys.modules)


@pytest.mark.parametrize("path", ["plugin_good:f", "plugin_package.inner:f", "plugin_broken:f", "math:anything"])
def test_no_fault_is_reported_where_there_is_none_or_only_running_would_tell(directory: Path, path: str) -> None:
    (directory / "plugin_broken.py").write_text("globals()['f'] = print\n")
    assert plugin_fault(path, setting="x", search_path=[directory]) is None
    assert str(directory) not in sys.path


@pytest.mark.parametrize("extra", sorted(set(EXTRAS.values())))
def test_the_install_command_of_an_extra_names_libraries_of_the_index(extra: str) -> None:
    """`rollbook[...]` is not on an index, so a command with it would fail."""
    command = install_command(extra)
    assert command.startswith("pip install '")
    assert "rollbook" not in command


def test_warnings_of_torchao_and_about_its_classes_are_hidden_and_others_are_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    hide_warnings_of_torchao()
    theirs, ours = Enum("theirs", "a", module="torchao.quantization"), Enum("ours", "a", module="torchaoish")
    logging.getLogger("torchao").warning("Failed to load %s", "_C_mxfp8.so")
    logging.getLogger("torchao").error("an error")
    logging.getLogger("torchao.optim").warning("of a part that a run uses")
    for named in (theirs, ours):
        logging.getLogger("torch.utils._pytree").warning("%s is an Enum subclass", named)
    assert caplog.messages == ["an error", "of a part that a run uses", f"{ours} is an Enum subclass"]


def test_each_package_that_imports_transformers_hides_them_first() -> None:
    def text(file: Path) -> str:
        return file.read_text(encoding="utf-8") if file.exists() else ""

    imports = re.compile(r"^(from|import) (transformers|trl|peft)\b", re.MULTILINE)
    files = [file for folder in ("rollbook", "benchmarks") for file in (REPOSITORY / folder).rglob("*.py")]
    found = {
        file: [text(folder / "__init__.py") for folder in file.parents] for file in files if imports.search(text(file))
    }
    noisy = [
        file for file, packages in found.items() if not any("\nhide_warnings_of_torchao()" in one for one in packages)
    ]
    assert len(found) > 20
    assert noisy == []


def test_a_benchmark_prints_nothing_of_torchao() -> None:
    code = "import benchmarks.engine.models, sys; assert 'transformers.quantizers' in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=REPOSITORY)
    assert (done.returncode, done.stderr) == (0, "")


def test_importing_the_model_of_the_trainer_prints_nothing() -> None:
    code = "import rollbook.trainer.model.policy_model, sys; assert 'transformers.quantizers' in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
