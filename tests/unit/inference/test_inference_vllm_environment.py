"""vLLM has an environment of its own. Our guard and plug-in are imported there, without the rest of our dependencies."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rollbook.inference.vllm import guard

PACKAGE_ROOT = Path(guard.__file__).parents[3]
IN_VLLM_ENVIRONMENT = {"msgspec", "numpy", "safetensors", "typing_extensions", "vllm", "xxhash"}
"""What the plug-in may import: dependencies of vLLM, and xxhash, which `scripts/vllm_venv.sh` installs."""
VLLM_STUBS = """
import sys, types

class Stub(types.ModuleType):
    __path__ = []
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})

for name in (
    "safetensors", "safetensors.torch", "vllm", "vllm.distributed", "vllm.distributed.weight_transfer",
    "vllm.distributed.weight_transfer.base", "vllm.model_executor", "vllm.model_executor.layers",
    "vllm.model_executor.layers.utils", "vllm.model_executor.model_loader", "vllm.model_executor.model_loader.reload",
):
    sys.modules[name] = Stub(name)
"""


def loaded_by(module: str) -> set[str]:
    """The modules outside the standard library that a new interpreter holds after importing `module`."""
    code = (
        f"{VLLM_STUBS}\nimport json, {module}\n"
        "print(json.dumps([m for m in sys.modules if m.split('.')[0] not in sys.stdlib_module_names]))"
    )
    ended = subprocess.run([sys.executable, "-c", code], cwd=PACKAGE_ROOT, capture_output=True, text=True, check=True)
    return set(json.loads(ended.stdout))


@pytest.mark.parametrize("module", ["rollbook.inference.vllm.guard", "rollbook.inference.vllm.plugin"])
def test_guard_and_plug_in_load_neither_engine_nor_trainer(module: str) -> None:
    modules = {name for name in loaded_by(module) if name.split(".")[0] == "rollbook"}
    allowed = ("rollbook.contracts", "rollbook.inference.vllm", "rollbook.inference.weights.safetensors")
    packages = {"rollbook", "rollbook.inference", "rollbook.inference.weights"}
    assert module in modules
    assert {name for name in modules - packages if not name.startswith(allowed)} == set()


def test_the_plug_in_needs_only_packages_of_the_vllm_environment() -> None:
    packages = {name.split(".")[0] for name in loaded_by("rollbook.inference.vllm.plugin")}
    public = {name for name in packages if not name.startswith("_")}
    assert public <= {"rollbook", *IN_VLLM_ENVIRONMENT}


def test_the_guard_needs_only_the_standard_library() -> None:
    """A run copies its file, so it has no package around it."""
    code = f"import runpy; print(runpy.run_path({guard.__file__!r})['VllmGuard'].__name__)"
    ended = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout == "VllmGuard\n"
