"""Several ranks load a model by slices: the same weights, and no rank ever holds all of them."""

import json
import multiprocessing
import shutil
from collections.abc import Iterator
from pathlib import Path
from queue import Queue

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from rollbook.shared_weights.files import unread_model
from rollbook.trainer.config import LoraSettings, TrainerConfig
from rollbook.trainer.model.policy_model import PolicyModel
from rollbook.trainer.model.weights import digest_of
from rollbook.trainer.model_config import ModelBuildConfig
from tests.models.families import family
from tests.parts.trainer.batches import BUILD, quick, tiny_model_dir
from tests.parts.trainer.memory import PeakMemory

SHARDED = quick(ranks=2)
RANKS = 4
LARGE = ModelBuildConfig(hidden_size=512, layers=16, heads=8, kv_heads=4, intermediate_size=1408, tokenizer="bytes")


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A process group with this process only: its shards are whole, and no other process is needed."""
    store = dist.FileStore(str(tmp_path / "store"), 1)  # type: ignore[attr-defined]  # torch leaves it untyped
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    return tiny_model_dir(tmp_path / "model", build=BUILD.model_copy(update={"layers": 3}))


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_of_several_files_is_loaded_by_slices_with_the_same_weights(
    tmp_path: Path, is_tied: bool, dtype: torch.dtype
) -> None:
    built = tiny_model_dir(tmp_path / "built", build=BUILD.model_copy(update={"tie_embeddings": is_tied, "layers": 3}))
    directory = tmp_path / "model"
    module = AutoModelForCausalLM.from_pretrained(built, dtype=dtype)
    module.generation_config.temperature = 0.7
    module.generation_config.do_sample = True
    module.save_pretrained(directory, max_shard_size="5KB")
    assert len(list(directory.glob("*.safetensors"))) > 1
    assert unread_model(directory, dtype=torch.float32) is not None
    whole, sliced = PolicyModel.load(directory, quick()), PolicyModel.load(directory, SHARDED)
    assert sliced.digest() == whole.digest()
    assert (sliced.num_parameters, sliced.is_packed, sliced.shape) == (
        whole.num_parameters,
        whole.is_packed,
        whole.shape,
    )
    for model, name in ((whole, "whole"), (sliced, "sliced")):
        model.save(tmp_path / name)
    exported = [
        {path.name: json.loads(path.read_text()) for path in (tmp_path / name).glob("*.json")}
        for name in ("whole", "sliced")
    ]
    assert exported[0] == exported[1], "an export has the settings of the model's directory"


@pytest.mark.usefixtures("alone")
def test_new_adapters_of_several_ranks_are_those_of_one(model_dir: Path) -> None:
    lora = LoraSettings(rank=4, targets=("q_proj", "down_proj"))
    whole, sliced = (PolicyModel.load(model_dir, quick(lora=lora, ranks=ranks)) for ranks in (1, 2))
    assert sliced.digest() == whole.digest()
    kinds = [model.publish_adapters() for model in (whole, sliced)]
    assert kinds[0] == kinds[1]
    assert sliced.digest() == whole.digest()


@pytest.mark.usefixtures("alone")
def test_a_model_whose_files_have_other_names_is_loaded_whole(model_dir: Path) -> None:
    """As files of an older format, which transformers converts."""
    path = model_dir / "model.safetensors"
    weights = load_file(path)
    expected = PolicyModel.load(model_dir, quick()).digest()
    save_file(
        {name.removeprefix("model."): tensor for name, tensor in weights.items()}, path, metadata={"format": "pt"}
    )
    assert unread_model(model_dir, dtype=torch.float32) is None
    assert PolicyModel.load(model_dir, SHARDED).digest() == expected


def measure_rank(
    model_dir: Path, store: str, rank: int, config: TrainerConfig, results: "Queue[tuple[int, int]]"
) -> None:
    """Report how far the memory of this process rises while it loads the model, and while the weights are gathered."""
    shared = dist.FileStore(store, RANKS)  # type: ignore[attr-defined]  # torch leaves it untyped
    dist.init_process_group("gloo", store=shared, rank=rank, world_size=RANKS)
    torch.set_num_threads(1)
    dist.barrier()
    with PeakMemory() as loading:
        model = PolicyModel.load(model_dir, config)
    with PeakMemory() as sending:
        model.send_weights()
    results.put((loading.rise, sending.rise))
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_no_rank_holds_the_whole_model_while_it_loads_or_sends_its_weights(tmp_path: Path) -> None:
    model_dir = tiny_model_dir(tmp_path / "model", build=LARGE)
    size = (model_dir / "model.safetensors").stat().st_size
    spawn = multiprocessing.get_context("spawn")
    results: Queue[tuple[int, int]] = spawn.Queue()  # type: ignore[assignment]  # has the same methods
    config = quick(ranks=RANKS)
    ranks = [
        spawn.Process(target=measure_rank, args=[model_dir, str(tmp_path / "store"), rank, config, results])
        for rank in range(RANKS)
    ]
    for rank in ranks:
        rank.start()
    measured = [results.get(timeout=300) for _ in ranks]
    for rank in ranks:
        rank.join(60)
    shutil.rmtree(model_dir)
    assert max(loading for loading, _ in measured) < 0.6 * size, (measured, size)
    assert max(sending for _, sending in measured) < 0.2 * size, (measured, size)


@pytest.mark.usefixtures("alone")
def test_shards_of_experts_are_published_and_saved_under_the_names_of_the_files(tmp_path: Path) -> None:
    directory = tmp_path / "mixture"
    family("qwen3_moe").model().save_pretrained(directory)
    whole, sharded = PolicyModel.load(directory, quick()), PolicyModel.load(directory, SHARDED)
    files = load_file(directory / "model.safetensors")
    published = sharded.snapshot()
    assert {name: tuple(tensor.shape) for name, tensor in published.items()} == {
        name: tuple(tensor.shape) for name, tensor in files.items()
    }
    assert sharded.digest() == digest_of(published) == whole.digest()
    assert sharded.has_digest(whole.digest())
    sharded.save(tmp_path / "saved", published)
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert saved.keys() == files.keys()
    assert all(torch.equal(saved[name], tensor) for name, tensor in files.items())
    lora = LoraSettings(rank=2)
    bases = [PolicyModel.load(directory, quick(ranks=ranks, lora=lora)).publish_adapters() for ranks in (1, 2)]
    assert bases[0].base_digest == bases[1].base_digest
