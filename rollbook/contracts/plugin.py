"""Loads objects by short name or `module:attribute`: built-in parts, user code, and our own modules behind optional libraries."""

import ast
import importlib
import importlib.util
import logging
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rollbook.contracts.errors import RunError
from rollbook.contracts.user_errors import describe_error, did_you_mean


class PluginError(RunError):
    """User code that the configuration names cannot be found, imported or used."""


class MissingExtraError(RunError):
    """A library is not installed. The message names the extra that installs it."""


EXTRAS = {
    "jinja2": "rollout",
    "tokenizers": "rollout",
    "torch": "train",
    "transformers": "train",
    "safetensors": "train",
    "peft": "lora",
    "torchao": "quantized",
    "ray": "cluster",
    "tensorboard": "tensorboard",
    "wandb": "wandb",
    "gguf": "models",
    "accelerate": "models",
    "matplotlib": "plots",
    "ministack": "aws",
    "awscli": "aws",
    "boto3": "s3",
    "botocore": "aws",
    "yaml": "aws",
    "jmespath": "aws",
    "math_verify": "maths",
    "reasoning_gym": "maths",
    "psycopg": "postgres",
    "pyarrow": "parquet",
    "llguidance": "grammars",
    "mcp": "mcp",
    "e2b": "e2b",
    "modal": "modal",
    "mcp_types": "mcp",
    "datasets": "datasets",
    "huggingface_hub": "hub",
}
"""Optional libraries, by the name under which they are imported, and the extra of this package that installs each."""

NO_SHORT_NAMES: Mapping[str, str] = MappingProxyType({})

_search_path: list[str] = []
"""Directories added by `extend_search_path`, for error messages and for child processes. Imports use `sys.path`."""


def extend_search_path(directories: Iterable[str | Path]) -> None:
    """Make user modules in these directories importable. Permanent, because such a module may import others later."""
    for directory in reversed([str(directory) for directory in directories]):
        if directory not in _search_path:
            _search_path.insert(0, directory)
        if directory not in sys.path:
            sys.path.insert(0, directory)


def search_path() -> tuple[str, ...]:
    """The directories with user modules, for a child process that imports them too."""
    return tuple(_search_path)


def load_plugin(
    path: str, *, setting: str, default: str | None = None, builtin: Mapping[str, str] = NO_SHORT_NAMES
) -> Any:
    """The callable at `module:attribute`, or the attribute `default` of `module`. `setting` names it in error messages.

    `builtin` maps short names to paths. A short name takes precedence over a user's module of the same name.
    """
    module_name, attribute = _split(path, setting, default, builtin)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if module_name == missing or module_name.startswith(f"{missing}."):
            raise PluginError(_no_module(path, setting, module_name, _search_path, builtin)) from error
        hint = f": {_install_command(missing)}" if _extra_of(missing) else ""
        raise PluginError(
            f"{setting} = {path!r}: {module_name} imports {missing!r}, which is not installed{hint}"
        ) from error
    except Exception as error:  # User code: its import can raise anything.
        raise PluginError(f"{setting} = {path!r}: importing it raised {describe_error(error)}") from error
    found = getattr(module, attribute, None)
    if found is None:
        own = [name for name, value in vars(module).items() if getattr(value, "__module__", None) == module_name]
        raise PluginError(_no_attribute(path, setting, module_name, attribute, own))
    if not callable(found):
        raise PluginError(f"{setting} = {path!r}: {attribute} is not callable, it is of type {type(found).__name__}")
    return found


def plugin_fault(
    path: str,
    *,
    setting: str,
    search_path: Sequence[str | Path],
    default: str | None = None,
    builtin: Mapping[str, str] = NO_SHORT_NAMES,
) -> str | None:
    """Why `load_plugin` would not find this path, or None. Reads source files and imports nothing."""
    try:
        module_name, attribute = _split(path, setting, default, builtin)
    except PluginError as error:
        return str(error)
    directories = [str(directory) for directory in search_path]
    spec = find_module(module_name, directories)
    if spec is None:
        return _no_module(path, setting, module_name, directories, builtin)
    if spec.origin is None or not spec.origin.endswith(".py"):
        return None
    try:
        names = _top_level_names(Path(spec.origin))
    except (OSError, SyntaxError) as error:
        return f"{setting} = {path!r}: {spec.origin} cannot be read as Python: {describe_error(error)}"
    if names is None or attribute in names:
        return None
    return _no_attribute(path, setting, module_name, attribute, names)


def load_on_demand(path: str) -> Any:
    """A module of our own, or `module:attribute`. Raises `MissingExtraError` if an optional library is not installed.

    For modules that import a heavy or optional library: only the process that was configured to use it imports it.
    """
    module_name, _, attribute = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        library = error.name or ""
        if _extra_of(library) is None:
            raise
        raise _missing_extra(library) from error
    return getattr(module, attribute) if attribute else module


def require_libraries(*libraries: str) -> None:
    """Raise `MissingExtraError` if one is not installed. For commands whose child process would fail to import it."""
    for library in libraries:
        if importlib.util.find_spec(library) is None:
            raise _missing_extra(library)


def _missing_extra(library: str) -> MissingExtraError:
    return MissingExtraError(f"the library {library!r} is not installed: {_install_command(library)}")


def install_command(extra: str) -> str:
    """The command that installs what an extra needs. It names libraries, so that it works for a clone and for a wheel alike."""
    return "pip install " + " ".join(f"'{requirement}'" for requirement in _requirements(extra))


def _requirements(extra: str) -> list[str]:
    """What `extra` adds, as the installed package declares it: lines like `peft>=0.17; extra == "lora"`."""
    try:
        declared = metadata.requires("rollbook") or []
    except metadata.PackageNotFoundError:  # Run from its source folder, not installed.
        return [f"rollbook[{extra}]"]
    found = []
    for line in declared:
        requirement, _, marker = line.partition(";")
        if f'extra == "{extra}"' not in marker:
            continue
        if requirement.startswith("rollbook["):
            for name in requirement.strip().removeprefix("rollbook[").removesuffix("]").split(","):
                found += _requirements(name)
        else:
            found.append(requirement.strip())
    return found


def _install_command(library: str) -> str:
    return install_command(EXTRAS[library.partition(".")[0]])


def _extra_of(library: str) -> str | None:
    return EXTRAS.get(library.partition(".")[0])


def _split(path: str, setting: str, default: str | None, builtin: Mapping[str, str]) -> tuple[str, str]:
    module_name, colon, attribute = builtin.get(path, path).partition(":")
    if not colon and default is not None:
        attribute = default
    if not module_name or not attribute:
        if builtin:
            raise PluginError(
                f"{setting} = {path!r} is neither built in ({', '.join(sorted(builtin))}) nor module:attribute of your own"
                f"{did_you_mean(path, builtin)}"
            )
        raise PluginError(f"{setting} = {path!r} does not have the form module:attribute")
    return module_name, attribute


def _no_module(
    path: str, setting: str, module_name: str, directories: Sequence[str], builtin: Mapping[str, str]
) -> str:
    places = " or ".join([*directories, "the installed packages"])
    found = [file.stem for directory in directories for file in Path(directory).glob("*.py")]
    known = f" (built in: {', '.join(sorted(builtin))})" if builtin else ""
    advice = did_you_mean(module_name, [*builtin, *found]) or "; create it, or correct the path"
    return f"{setting} = {path!r}: no module {module_name!r} in {places}{known}{advice}"


def _no_attribute(path: str, setting: str, module_name: str, attribute: str, names: Iterable[str]) -> str:
    known = sorted(name for name in names if not name.startswith("_"))
    advice = did_you_mean(attribute, known) or "; define it, or correct the path"
    return (
        f"{setting} = {path!r}: module {module_name} has no {attribute!r} "
        f"(it defines {', '.join(known) or 'nothing'}){advice}"
    )


def find_module(module_name: str, directories: Sequence[str]) -> ModuleSpec | None:
    """Like `importlib.util.find_spec`, but does not import the parent packages."""
    parts = module_name.split(".")
    saved = list(sys.path)
    sys.path[:0] = directories
    try:
        spec: ModuleSpec | None = None
        places: Sequence[str] | None = None
        for count in range(1, len(parts) + 1):
            name = ".".join(parts[:count])
            specs = (finder.find_spec(name, places) for finder in sys.meta_path)
            spec = next((found for found in specs if found is not None), None)
            if spec is None:
                return None
            # A plain module has no places, so nothing is found inside it.
            places = list(spec.submodule_search_locations or ())
        return spec
    finally:
        sys.path[:] = saved


def _top_level_names(file: Path) -> set[str] | None:
    """Names that a module binds at its top level; None if only running it would show."""
    names: set[str] = set()
    pending: list[ast.AST] = [ast.parse(file.read_bytes(), filename=str(file))]
    while pending:
        node = pending.pop()
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
                continue
            case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                names.update(alias.asname or alias.name.partition(".")[0] for alias in aliases)
            case ast.Name(id=name) if name == "globals" or isinstance(node.ctx, ast.Store):
                names.add(name)
        pending.extend(ast.iter_child_nodes(node))
    return None if names & {"*", "globals", "__getattr__"} else names


def hide_warnings_of_torchao() -> None:
    """Hide those about kernels that this machine or version of torch lacks, and torch's about classes of torchao. May be repeated.

    transformers imports torchao if it is installed. The packages that import transformers call this first, in their `__init__`.
    """
    # Filters of these two loggers only: the parts of torchao that a run uses have loggers of their own.
    logging.getLogger("torchao").addFilter(_is_error)
    logging.getLogger("torch.utils._pytree").addFilter(_names_no_class_of_torchao)


def _is_error(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR


def _names_no_class_of_torchao(record: logging.LogRecord) -> bool:
    named = record.args if isinstance(record.args, tuple) else ()
    return not any(isinstance(one, type) and one.__module__.partition(".")[0] == "torchao" for one in named)
