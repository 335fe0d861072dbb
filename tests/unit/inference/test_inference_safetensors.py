"""Weight files are read without a tensor library, and refused if they are incomplete."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from rollbook.contracts.weights import WeightsError, weights_digest
from rollbook.inference.weights.safetensors import read_published_weights, read_weights
from tests.parts.inference.models import publication


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "weights.safetensors"
    tensors = {"b": torch.arange(6, dtype=torch.float32).view(2, 3), "a": torch.ones(4, dtype=torch.bfloat16)}
    save_file(tensors, path, metadata={"format": "pt"})
    return path


def test_names_dtypes_shapes_and_bytes_equal_those_of_the_reference_writer(path: Path) -> None:
    tensors = read_weights(path)
    assert {name: (t.dtype, t.shape) for name, t in tensors.items()} == {"a": ("BF16", (4,)), "b": ("F32", (2, 3))}
    assert bytes(tensors["b"].data) == torch.arange(6, dtype=torch.float32).numpy().tobytes()


def test_the_digest_does_not_depend_on_the_order_in_the_file(path: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.safetensors"
    save_file({"a": torch.ones(4, dtype=torch.bfloat16), "b": torch.arange(6, dtype=torch.float32).view(2, 3)}, other)
    assert weights_digest(read_weights(path).values()) == weights_digest(read_weights(other).values())


def test_one_changed_bit_changes_the_digest(path: Path) -> None:
    good = publication(1, weights_digest(read_weights(path).values()))
    read_published_weights(path, good)
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    with pytest.raises(WeightsError, match="publication 1"):
        read_published_weights(path, good)


@pytest.mark.parametrize("kept", [0, 3, 8, 40, -1])
def test_a_truncated_file_is_refused_by_name(path: Path, kept: int) -> None:
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(WeightsError, match=r"weights\.safetensors"):
        read_weights(path)


def test_open_tensors_stay_valid_when_the_file_is_replaced(path: Path, tmp_path: Path) -> None:
    tensors = read_weights(path)
    before = weights_digest(tensors.values())
    newer = tmp_path / "newer"
    newer.write_bytes(b"something else")
    newer.replace(path)
    assert weights_digest(tensors.values()) == before
