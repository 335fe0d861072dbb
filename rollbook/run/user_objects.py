"""Functions and classes that a script or a notebook passes to `rollbook.train`.

The processes of a run load user code by `module:attribute`. An object that they can import is passed by its name. Any other object
(of a script, of a notebook cell, a lambda) is passed by value: pickled next to a small module that loads it, in `objects/` of the
run directory. Tasks are passed as rows. File names contain a digest of the content, so an unchanged object keeps its name.
"""

import contextlib
import functools
import hashlib
import inspect
import io
import json
import keyword
import linecache
import pickle
import re
import sys
import sysconfig
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import cloudpickle  # type: ignore[import-untyped]  # it has no type hints

from rollbook.contracts.plugin import PluginError, find_module

PICKLED_MODULE = '''"""{text}"""

from rollbook.run.user_objects import load_object

{attribute} = load_object(__file__)
'''
ROWS_MODULE = '''"""{text}"""

import json
from pathlib import Path


def {attribute}():
    with Path(__file__).with_suffix(".jsonl").open(encoding="utf-8") as lines:
        yield from map(json.loads, lines)
'''


class UserObjectError(PluginError):
    """An object cannot be sent to the processes of a run."""


def reference_to(value: Any, *, setting: str, directory: Path) -> str:
    """`module:attribute` under which the processes of a run load `value`. What they cannot import is written to `directory`."""
    found = importable_name(value)
    if found is not None:
        return found
    attribute = _attribute_name(value)
    sources: dict[str, str] = {}
    payload = _pickled(value, sources, setting)
    content = pickle.dumps((payload, sources))
    text = f"{_described(value)}, as it was passed to rollbook.train."
    module = _write_module(directory, attribute, PICKLED_MODULE.format(text=text, attribute=attribute), ".pkl", content)
    return f"{module}:{attribute}"


def reference_to_rows(rows: Sequence[Mapping[str, Any]], *, setting: str, directory: Path) -> str:
    """`module:attribute` of a function that yields these rows."""
    lines = []
    for number, row in enumerate(rows):
        try:
            lines.append(json.dumps(dict(row), allow_nan=False, ensure_ascii=False) + "\n")
        except (TypeError, ValueError) as error:
            raise UserObjectError(
                f"{setting}: row {number} is not plain JSON ({error}); a row is a mapping of strings, numbers, lists and mappings"
            ) from error
    text = ROWS_MODULE.format(text="The tasks that were passed to rollbook.train.", attribute="tasks")
    return f"{_write_module(directory, 'tasks', text, '.jsonl', ''.join(lines).encode())}:tasks"


def load_object(module_file: str) -> Any:
    """The object of a module that `reference_to` wrote."""
    payload, sources = pickle.loads(Path(module_file).with_suffix(".pkl").read_bytes())
    for name, text in sources.items():
        # For tracebacks that show lines of a notebook cell. Entries without a modification time are never compared with a file.
        linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    return pickle.loads(payload)


def user_search_path() -> list[Path]:
    """The directories in which this process finds modules, without those of the interpreter and of installed packages."""
    own = {Path(path).resolve() for path in sysconfig.get_paths().values()}
    found = [Path(entry or ".").resolve() for entry in sys.path]
    return [
        path for path in dict.fromkeys(found) if path.is_dir() and not any(path == o or o in path.parents for o in own)
    ]


def importable_name(value: Any) -> str | None:
    """`module:name`, if a new process can import the object by it."""
    module_name, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if not isinstance(module_name, str) or not isinstance(name, str) or not name.isidentifier():
        return None
    module = sys.modules.get(module_name)
    if module_name == "__main__" or module is None or getattr(module, name, None) is not value:
        return None
    spec, file = find_module(module_name, ()), getattr(module, "__file__", None)
    if spec is None or (file is not None and spec.origin is not None and Path(spec.origin) != Path(file)):
        return None
    return f"{module_name}:{name}"


def _attribute_name(value: Any) -> str:
    name = getattr(value, "__name__", None) or type(value).__name__
    name = re.sub(r"\W", "", name)
    return f"{name}_function" if not name or keyword.iskeyword(name) else name


def _described(value: Any) -> str:
    """`score (train.py, line 12)`."""
    name = getattr(value, "__qualname__", None) or type(value).__qualname__
    code = getattr(inspect.unwrap(value) if callable(value) else value, "__code__", None)
    if code is None:
        return str(name)
    return f"{name} ({_shown_file(code)}, line {code.co_firstlineno})"


def _shown_file(code: CodeType) -> str:
    return (
        Path(code.co_filename).name if Path(code.co_filename).is_file() else "a notebook cell or an interactive session"
    )


def _write_module(directory: Path, name: str, text: str, suffix: str, content: bytes) -> str:
    directory.mkdir(parents=True, exist_ok=True)
    module = f"object_{name}_{hashlib.blake2b(text.encode() + content, digest_size=8).hexdigest()}"
    (directory / module).with_suffix(suffix).write_bytes(content)
    (directory / f"{module}.py").write_text(text, encoding="utf-8")
    return module


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle is not typed
    """Gives code without a file (of a notebook cell) a name that depends on its text only, and collects the text.

    The digest of an unchanged function is then the same in every notebook session.
    """

    def __init__(self, file: io.BytesIO, sources: dict[str, str]) -> None:
        self._sources = sources
        # Before `__init__`, which reads the table.
        self.dispatch_table = ChainMap({CodeType: self._reduce_code}, cloudpickle.Pickler.dispatch_table)
        super().__init__(file)

    def _reduce_code(self, code: CodeType) -> Any:
        text = "".join(linecache.getlines(code.co_filename))
        if text and not Path(code.co_filename).is_file():
            name = f"<cell {hashlib.blake2b(text.encode(), digest_size=4).hexdigest()}>"
            self._sources[name] = text
            code = code.replace(co_filename=name)
        return cloudpickle.Pickler.dispatch_table[CodeType](code)


def _pickled(value: Any, sources: dict[str, str], setting: str) -> bytes:
    file = io.BytesIO()
    with _by_value(value):
        try:
            _Pickler(file, sources).dump(value)
        except Exception as error:
            path, culprit = _culprit(value, (_attribute_name(value),), set())
            kind = f"{type(culprit).__module__}.{type(culprit).__qualname__}"
            raise UserObjectError(
                f"{setting}: {_described(value)} cannot be sent to the processes of the run: "
                f"{' → '.join(path)} is a {kind}, which cannot be pickled ({error}). "
                "Create it inside the function, or move the code to a module that the processes can import"
            ) from error
    return file.getvalue()


@contextlib.contextmanager
def _by_value(value: Any) -> Iterator[None]:
    """Pickle the module of the object by value where other processes cannot import it."""
    module = sys.modules.get(getattr(value, "__module__", None) or "")
    if module is None or module.__name__ == "__main__" or find_module(module.__name__, ()) is not None:
        yield
        return
    cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        cloudpickle.unregister_pickle_by_value(module)


def _culprit(value: Any, path: tuple[str, ...], seen: set[int]) -> tuple[tuple[str, ...], Any]:
    """The innermost part that cannot be pickled, and the names that lead to it."""
    seen.add(id(value))
    for name, part in _parts(value):
        if id(part) not in seen and not isinstance(part, ModuleType) and not _can_pickle(part):
            return _culprit(part, (*path, name), seen)
    return path, value


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    match value:
        case FunctionType():
            found = inspect.getclosurevars(value)
            yield from {**found.nonlocals, **found.globals}.items()
            yield from ((f"default of {name}", part) for name, part in _defaults(value))
        case MethodType():
            yield from (("self", value.__self__), (value.__func__.__name__, value.__func__))
        case functools.partial():
            yield from (("function", value.func), *(("argument", part) for part in value.args), *value.keywords.items())
        case Mapping():
            yield from ((f"[{key!r}]", part) for key, part in value.items())
        case list() | tuple() | set():
            yield from ((f"[{number}]", part) for number, part in enumerate(value))
        case type():
            yield from ((name, part) for name, part in vars(value).items() if not name.startswith("__"))
        case _:
            yield from getattr(value, "__dict__", {}).items()


def _defaults(function: Callable[..., Any]) -> Iterator[tuple[str, Any]]:
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.default is not inspect.Parameter.empty:
            yield name, parameter.default


def _can_pickle(value: Any) -> bool:
    try:
        cloudpickle.dumps(value)
    except Exception:
        return False
    return True
