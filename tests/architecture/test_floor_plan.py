"""The floor plan: which folder may import which, and which modules may import heavy libraries."""

import ast
import re
import subprocess
import sys
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "rollbook"
GROUND = {"contracts", "concurrency", "telemetry", "access", "sandbox", "numerics", "shared_weights"}
ROOMS = {"tasks", "envs", "inference", "rollout", "ledger", "trainer"}
MAY_IMPORT: dict[str, set[str]] = {
    "contracts": set(),
    "concurrency": set(),
    "telemetry": {"contracts", "concurrency", "access"},
    "access": {"contracts", "concurrency"},
    "sandbox": {"contracts", "concurrency"},
    "numerics": {"contracts"},
    "shared_weights": {"contracts"},
    **dict.fromkeys(ROOMS, GROUND),
    "dashboard": GROUND,
    "simulation": GROUND,
    "integrations": GROUND | ROOMS,
    "run": GROUND | ROOMS | {"dashboard", "simulation"},
    "commands": GROUND | ROOMS | {"dashboard", "simulation", "run"},
    "cli": {"commands", "contracts"},
}
# Heavy libraries, and the only modules that may import them.
DOORS: dict[str, tuple[str, ...]] = {
    "torch": (
        "rollbook/numerics/",
        "rollbook/shared_weights/",
        "rollbook/trainer/",
        "rollbook/inference/engines/embedded/",
        "rollbook/inference/weights/transports/",
        "rollbook/inference/vllm/nccl.py",
        "rollbook/integrations/",
    ),
    "transformers": (
        "rollbook/shared_weights/",
        "rollbook/trainer/",
        "rollbook/inference/engines/embedded/",
        "rollbook/integrations/",
    ),
    "safetensors": (
        "rollbook/shared_weights/",
        "rollbook/trainer/",
        "rollbook/inference/engines/embedded/",
        "rollbook/inference/weights/transports/",
        "rollbook/inference/vllm/plugin.py",
        "rollbook/integrations/",
    ),
    "torchao": ("rollbook/trainer/optimizer_state/eight_bit.py",),
    "vllm": ("rollbook/inference/vllm/plugin.py",),
    "matplotlib": ("rollbook/dashboard/plots.py",),
    "sqlite3": (
        "rollbook/ledger/stores/sqlite/",
        "rollbook/dashboard/index/",
        "rollbook/rollout/rewards/teacher_scores.py",
    ),
    "ray": ("rollbook/run/supervision/ray_host.py", "rollbook/commands/checks/ray_nodes.py"),
    "psycopg": ("rollbook/ledger/stores/postgres/connection.py",),
    "boto3": ("rollbook/access/object_store.py",),
    "huggingface_hub": ("rollbook/commands/record/hub.py", "rollbook/trainer/"),
    "datasets": ("rollbook/tasks/hub.py",),
    "pyarrow": (
        "rollbook/tasks/parquet.py",
        "rollbook/ledger/tools/parquet.py",
    ),
    "tokenizers": ("rollbook/rollout/chat/tokenizer.py", "rollbook/trainer/"),
    "llguidance": ("rollbook/inference/server/grammars.py",),
    "jinja2": ("rollbook/rollout/chat/tokenizer.py",),
    "cloudpickle": ("rollbook/run/user_objects.py",),
}
TORCH_FREE = (
    "config",
    "loss_settings",
    "advantages",
    "rows",
    "passes",
    "minibatches",
    "planner",
    "planning",
    "metrics",
)


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def nodes_of(path: Path) -> list[ast.AST]:
    return list(ast.walk(tree_of(path)))


@cache
def imports_of(path: Path) -> list[tuple[str, int]]:
    """Every imported module with its line; `from package import module` counts as that module."""
    found = []
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            folder = PACKAGE.parent.joinpath(*node.module.split("."))
            for alias in node.names:
                is_module = (folder / f"{alias.name}.py").exists()
                found.append((f"{node.module}.{alias.name}" if is_module else node.module, node.lineno))
    return found


def room_of(module: str) -> str | None:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[0] == "rollbook" else None


def sources() -> list[Path]:
    # `templates` and `demo` hold files of users' projects, which are not modules of the package.
    return sorted(path for path in PACKAGE.rglob("*.py") if not {"templates", "demo"} & set(path.parts))


def test_every_import_follows_the_floor_plan() -> None:
    violations = []
    for path in sources():
        importer = path.relative_to(PACKAGE).parts[0]
        if importer.endswith(".py"):
            continue
        for module, line in imports_of(path):
            room = room_of(module)
            if room is not None and room != importer and room not in MAY_IMPORT[importer]:
                violations.append(f"{path.relative_to(PACKAGE.parent)}:{line} imports {module}")
    assert violations == []


def test_the_package_imports_neither_scripts_nor_tests_nor_benchmarks() -> None:
    violations = [
        f"{path.relative_to(PACKAGE.parent)}:{line} imports {module}"
        for path in sources()
        for module, line in imports_of(path)
        if module.split(".")[0] in {"scripts", "tests", "benchmarks", "examples"}
    ]
    assert violations == []


def test_the_rooms_are_those_of_the_architecture_page() -> None:
    page = (PACKAGE.parent / "docs" / "architecture.md").read_text(encoding="utf-8")
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    listed = {name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])}
    rooms = {path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert rooms - listed == set()


def test_the_public_face_imports_nothing_until_a_name_is_used() -> None:
    code = (
        "import sys, rollbook; print(*sorted(m for m in sys.modules if m.split('.')[0] not in sys.stdlib_module_names))"
    )
    loaded = subprocess.run(
        [sys.executable, "-I", "-S", "-c", f"import sys; sys.path.insert(0, {str(PACKAGE.parent)!r}); {code}"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert loaded.stdout.split() == ["__main__", "rollbook"]


def folders() -> list[Path]:
    return sorted({path.parent for path in sources()} - {PACKAGE})


def imports_between_children(folder: Path) -> dict[str, set[str]]:
    """Which direct children (modules and sub-folders) of a folder import which others."""
    prefix = ("rollbook", *folder.relative_to(PACKAGE).parts)
    edges: dict[str, set[str]] = {}
    for path in sorted(folder.rglob("*.py")):
        child = path.relative_to(folder).parts[0].removesuffix(".py")
        if child == "__init__":
            continue
        targets = edges.setdefault(child, set())
        for module, _ in imports_of(path):
            parts = tuple(module.split("."))
            if parts[: len(prefix)] == prefix and len(parts) > len(prefix) and parts[len(prefix)] != child:
                targets.add(parts[len(prefix)])
    return edges


@pytest.mark.parametrize("folder", folders(), ids=lambda folder: folder.relative_to(PACKAGE).as_posix())
def test_the_parts_of_a_folder_do_not_import_each_other_in_a_circle(folder: Path) -> None:
    try:
        tuple(TopologicalSorter(imports_between_children(folder)).static_order())
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_no_folder_holds_more_than_sixteen_modules() -> None:
    counts = {folder.relative_to(PACKAGE).as_posix(): len(list(folder.glob("*.py"))) - 1 for folder in folders()}
    assert {name: count for name, count in counts.items() if count > 16} == {}


def test_heavy_libraries_are_imported_in_their_own_places_only() -> None:
    violations = []
    for path in sources():
        name = path.relative_to(PACKAGE.parent).as_posix()
        for module, line in imports_of(path):
            doors = DOORS.get(module.split(".")[0])
            if doors is not None and not name.startswith(doors):
                violations.append(f"{name}:{line} imports {module}")
            if module.split(".")[0] == "torch" and "trainer" in path.parts and path.stem in TORCH_FREE:
                violations.append(f"{name}:{line} imports torch, but must stay free of it")
    assert violations == []


def test_http_servers_are_started_behind_the_guard_only() -> None:
    """A server started elsewhere would skip the checks of `access/guard.py`."""
    starters = ("AppRunner", "ServerRunner", "run_app", "TCPSite", "SockSite", "UnixSite", "start_server")
    found = {
        path.relative_to(PACKAGE).as_posix()
        for path in sources()
        for node in nodes_of(path)
        if (isinstance(node, ast.Attribute) and node.attr in starters)
        or (isinstance(node, ast.Name) and node.id in starters)
    }
    # The program for another virtual environment cannot import the guard. It accepts requests with its token only. The relay passes
    # bytes on, on the loopback of a machine that is private to a sandbox.
    assert found == {"access/server.py", "rollout/verifiers/service.py", "sandbox/relay.py"}


def test_http_is_parsed_and_written_by_libraries_only() -> None:
    """A parser or a writer of our own would have to be fuzzed against that of aiohttp, split at every byte (decision 0010)."""
    libraries = {"http.server", "http.client", "socketserver", "h11", "httptools"}
    parts = {"aiohttp.http_parser", "aiohttp.http_writer"}
    found = set()
    for path in sources():
        name = path.relative_to(PACKAGE).as_posix()
        found |= {f"{name}:{line} imports {module}" for module, line in imports_of(path) if module in libraries | parts}
        for node in nodes_of(path):
            match node:
                case ast.Constant(value=str() | bytes() as value):
                    text = value if isinstance(value, str) else value.decode("latin-1")
                    # The exception reads line ends in the text of a policy.
                    if "HTTP/1" in text or ("\r\n" in text and name != "envs/builtin/awscli/commands.py"):
                        found.add(f"{name}:{node.lineno} writes or parses a head or a chunk")
                case ast.FunctionDef(name="data_received" | "buffer_updated"):
                    found.add(f"{name}:{node.lineno} receives bytes of a connection")
                case ast.Attribute(
                    attr="write" | "writelines", value=ast.Name(id="transport") | ast.Attribute(attr="transport")
                ):
                    found.add(f"{name}:{node.lineno} writes to a connection past its HTTP library")
    assert found == set()


def test_imports_are_at_the_top_of_the_file() -> None:
    hidden = []
    for path in sources():
        for function in nodes_of(path):
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                hidden += [
                    f"{path.relative_to(PACKAGE.parent)}:{node.lineno}"
                    for node in ast.walk(function)
                    if isinstance(node, ast.Import | ast.ImportFrom)
                ]
    assert hidden == []


def test_contracts_import_only_the_standard_library_numpy_xxhash_and_msgspec() -> None:
    violations = [
        f"{path.name}:{line} imports {module}"
        for path in sorted((PACKAGE / "contracts").glob("*.py"))
        for module, line in imports_of(path)
        if module.split(".")[0] not in sys.stdlib_module_names | {"numpy", "xxhash", "msgspec", "rollbook"}
    ]
    assert violations == []


def test_decoders_are_made_in_one_place_because_msgspec_crashes_when_two_threads_make_them() -> None:
    # `msgspec.json.decode` makes no decoder, but it has no limit of depth.
    makers = re.compile(
        r"msgspec\.convert|msgspec\.json\.decode|msgspec\.(json|msgpack|toml|yaml)\.(Decoder\(|decode\([^\n]*type=)"
    )
    violations = [
        f"{path.relative_to(PACKAGE.parent)}: {found.group()}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if path != PACKAGE / "contracts" / "decoding.py"
        for found in makers.finditer(path.read_text())
    ]
    assert violations == []


def test_processes_without_a_model_start_without_torch() -> None:
    processes = ("cli.main", "run.processes.ledger_server", "run.processes.rollout", "commands.record.dashboard")
    heavy = {"torch", "transformers", "matplotlib", "psycopg", "pyarrow"}
    # One interpreter imports all: the first line with a library names the process that loads it.
    code = "import sys\n" + "".join(
        f"import rollbook.{one}; print({one!r}, *sorted({heavy!r} & set(sys.modules)))\n" for one in processes
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown.splitlines() == list(processes)


def test_a_public_class_name_is_defined_in_one_module() -> None:
    modules: dict[str, list[str]] = {}
    for path in sources():
        for node in tree_of(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                modules.setdefault(node.name, []).append(path.relative_to(PACKAGE).as_posix())
    assert {name: paths for name, paths in modules.items() if len(paths) > 1} == {}


UNPICKLING = {
    "rollout/workers/main.py": "the dispatcher, over a socket pair that the worker inherits",
    "trainer/data/planner.py": "the trainer and its planning child, over a socket pair that the child inherits",
    "run/preflight/checks.py": "the command, over the standard input of its child",
    "run/user_objects.py": "the user's script, in `objects/` of the run directory",
    "trainer/checkpoints/checkpoints.py": "the trainer, in a checkpoint; torch reads tensors only (`weights_only`)",
}
"""Modules that read pickles, and who writes them. docs/security.md has the same list. No socket that another process can open."""


def test_only_the_listed_modules_read_pickles() -> None:
    found = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if re.search(r"pickle\.loads?\(|torch\.load\(|joblib|shelve|multiprocessing", path.read_text(encoding="utf-8"))
    }
    assert found == set(UNPICKLING), "say in docs/security.md who can write what the module reads"


def test_torch_load_reads_tensors_only() -> None:
    for path in PACKAGE.rglob("*.py"):
        for call in re.findall(r"torch\.load\([^\n]*", path.read_text(encoding="utf-8")):
            assert "weights_only=True" in call, path


def test_the_security_page_lists_every_module_that_reads_pickles() -> None:
    page = (PACKAGE.parent / "docs" / "security.md").read_text(encoding="utf-8")
    assert [module for module in UNPICKLING if f"`rollbook/{module}`" not in page] == []
