"""The frozen base in shared memory: trainer and engine compute with it as with their own, and no process can change it."""

import faulthandler
import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from rollbook.contracts.errors import RunError
from rollbook.contracts.policy import Publication, PublicationId, SamplingParams
from rollbook.contracts.weights import WeightsError
from rollbook.inference.config import InferenceConfig
from rollbook.inference.engines.embedded.engine import TransformersEngine, open_engine
from rollbook.inference.engines.embedded.model.llama import LlamaForward
from rollbook.inference.engines.embedded.model.module import load_module
from rollbook.shared_weights import base as base_module
from rollbook.shared_weights.base import ALIGNMENT, BaseOwner, NotSharedError, in_order, map_base, refuse_base
from rollbook.shared_weights.memory import CHECKED_WORDS, checksum, new_block, open_block
from rollbook.trainer.checkpoints.checkpoints import initial_learner
from rollbook.trainer.config import LoraSettings, TrainerConfig
from rollbook.trainer.data.minibatches import plan
from rollbook.trainer.data.rows import flatten
from rollbook.trainer.model.frozen_base import own_base
from rollbook.trainer.model.policy_model import PolicyModel
from tests.models.families import FAMILIES, Family
from tests.parts.inference.models import save_model
from tests.parts.trainer.batches import quick, recorded_batch, tiny_model_dir

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="main memory is shared on Linux only")

DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True, slots=True, kw_only=True)
class Offered:
    """A base that this process owns."""

    model_dir: Path
    owner: BaseOwner
    file: Path

    def holds(self, tensor: Tensor) -> bool:
        """Each map has another address, but the size of the whole base."""
        return tensor.untyped_storage().nbytes() == self.owner.num_bytes


def offered(model_dir: Path, dtype: str = "float32") -> Offered:
    file = model_dir.with_name(f"{model_dir.name}-{dtype}.json")
    owner, digest = own_base(model_dir, dtype=dtype, device="cpu")
    owner.offer(file, digest=digest)
    return Offered(model_dir=model_dir, owner=owner, file=file)


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    torch.set_num_threads(1)
    return tiny_model_dir(tmp_path / "model")


def lora(dtype: str = "float32") -> TrainerConfig:
    return quick(lora=LoraSettings(rank=4, alpha=8), compute_dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_steps_have_the_same_bits_as_with_an_own_base_and_it_is_not_copied(model_dir: Path, dtype: str) -> None:
    shared = offered(model_dir, dtype)
    ours = initial_learner(model_dir, lora(dtype), shared_base=shared.file)
    own = initial_learner(model_dir, lora(dtype))
    assert ours.publish_adapters() == own.publish_adapters(), "the digest of the base is the same"
    for step in (1, 2, 3):
        ours.run(recorded_batch(step))
        own.run(recorded_batch(step))
        assert ours.model.digest() == own.model.digest()
    for module in (ours.model.module, ours.model.network.language_model):
        assert all(
            shared.holds(p) is not p.requires_grad for name, p in module.named_parameters() if ".lora_" not in name
        )
    shared.owner.check()


async def samples(engine: TransformersEngine) -> list[tuple[list[int], list[float]]]:
    await engine.adopt(Publication(id=PublicationId(1), epoch=1, step=0, digest=""))
    found = [await engine.generate([1, 4, number], SamplingParams(max_tokens=12, seed=number)) for number in range(3)]
    return [(one.token_ids.tolist(), one.logprobs.tolist()) for one in found]


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "gpt2", "qwen3_moe", "qwen3_5_text"])
async def test_an_engine_samples_the_same_without_a_copy_even_of_fused_projections(tmp_path: Path, kind: str) -> None:
    torch.set_num_threads(1)
    save_model(tmp_path / kind, kind)
    shared = offered(tmp_path / kind)
    config = InferenceConfig(max_running=2, kv_memory_mb=10)
    async with (
        open_engine(config, shared.model_dir) as own,
        open_engine(config, shared.model_dir, shared_base=shared.file) as ours,
    ):
        assert await samples(ours) == await samples(own)
        assert await ours.base_digest() == await own.base_digest()
        # The biases of this tiny model do not fill the alignment, so the engine joins a copy of them.
        assert all(shared.holds(p) for p in ours.parts.module.parameters() if p.ndim > 1)
        if isinstance(ours.parts.model, LlamaForward):
            layers = ours.parts.model._layers
            assert all(shared.holds(layer.fused.weight_OE) for layer in layers)
            assert all(shared.holds(layer.mlp.gate_up.weight_OE) for layer in layers if layer.mlp is not None)
        else:
            assert kind == "gpt2"
        tensors = dict(own.parts.module.named_parameters())
        with pytest.raises(WeightsError, match="adapters only; nothing was loaded"):
            await ours.load_tensors(Publication(id=PublicationId(2), epoch=1, step=1, digest="d"), tensors)


QUICK = {"Qwen3-MoE", "DeepSeek V3", "OLMo hybrid"}
NOT_SHARED = {
    "Gemma 4 (text)": "rounds model.layers.0.layer_scalar",
    "Kimi Linear": "rounds model.layers.1.mlp.gate.e_score_correction_bias",
    "MiniMax M2": "rounds model.layers.0.mlp.e_score_correction_bias",
    "DeepSeek V4": "weights in several precisions",
    "OLMo hybrid": "weights in several precisions",
    "Apertus": "rounds model.layers.0.mlp.act_fn.beta",
    "Bailing hybrid": "weights in several precisions",
    "ERNIE 4.5 MoE": "weights in several precisions",
    "Hunyuan MoE": "weights in several precisions",
    "LongCat Flash": "rounds model.layers.0.mlp.router.e_score_correction_bias",
    "MiniMax Text": "rounds model.layers.0.self_attn.slope_rate",
}
"""In bfloat16."""


@pytest.mark.parametrize(
    "family",
    [pytest.param(f, id=f.name, marks=() if f.name in QUICK else pytest.mark.slow) for f in FAMILIES],
)
@pytest.mark.filterwarnings("ignore")
def test_every_family_has_the_same_logits_with_a_shared_base_or_is_refused(tmp_path: Path, family: Family) -> None:
    torch.set_num_threads(1)
    family.model().save_pretrained(tmp_path / "model")
    if (reason := NOT_SHARED.get(family.name)) is not None:
        with pytest.raises(NotSharedError, match=re.escape(reason)):
            offered(tmp_path / "model", "bfloat16")
        return
    shared = offered(tmp_path / "model", "bfloat16")
    base = map_base(shared.file, device="cpu")
    engines = [
        load_module(shared.model_dir, device="cpu", dtype="bfloat16", max_model_len=64, base=one)[0]
        for one in (None, base)
    ]
    ids = torch.arange(3, 27).reshape(2, 12)
    with torch.no_grad():
        expected, found = (engine(input_ids=ids, use_cache=False).logits for engine in engines)
    assert torch.equal(found, expected)
    own, ours = (
        PolicyModel.load(shared.model_dir, quick(compute_dtype="bfloat16"), is_reference=True, shared_base=file)
        for file in (None, shared.file)
    )
    assert torch.equal(logprobs(ours), logprobs(own))
    assert all(shared.holds(p) for module in (engines[1], ours.module) for p in module.parameters())


def logprobs(model: PolicyModel) -> Tensor:
    (minibatch,) = plan(flatten(recorded_batch(1), quick()), quick(), step=1, is_packed=model.is_packed)
    with torch.no_grad():
        return torch.cat([model.token_logprobs(micro)[0] for micro in minibatch.microbatches])


def forked(run: Callable[[], object]) -> int:
    """The pid of a child that runs the function. A new process would import torch for seconds."""
    if pid := os.fork():
        return pid
    faulthandler.disable()
    try:
        run()
    finally:
        os._exit(1)


def test_a_process_that_writes_to_the_base_is_ended_by_the_kernel_and_nothing_changes(model_dir: Path) -> None:
    shared = offered(model_dir)
    base = map_base(shared.file, device="cpu")
    assert base is not None
    _, status = os.waitpid(forked(lambda: base.tensors["model.norm.weight"].add_(1)), 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGSEGV
    shared.owner.check()


def test_not_even_its_owner_can_write_to_a_finished_block() -> None:
    block = new_block("cpu", 512)
    block.write(0, torch.arange(128, dtype=torch.int32))
    found, handle = block.finish()
    with pytest.raises(PermissionError):
        block.write(0, torch.zeros(1))
    with pytest.raises(PermissionError):
        os.open(f"/proc/self/fd/{handle['descriptor']}", os.O_WRONLY | os.O_TRUNC)
    assert torch.equal(open_block(handle).view(torch.int32), torch.arange(128, dtype=torch.int32))
    assert torch.equal(open_block(handle), found)


def test_the_base_of_an_owner_that_was_killed_cannot_be_mapped(tmp_path: Path) -> None:
    file = tmp_path / "base.json"

    def own() -> None:
        owner = BaseOwner([("a", "F32", (4,))], lambda name: torch.ones(4), device="cpu")
        owner.offer(file, digest="d")
        signal.pause()

    pid = forked(own)
    while not file.exists():
        assert os.waitpid(pid, os.WNOHANG) == (0, 0)
        time.sleep(0.01)
    mapped = map_base(file, device="cpu")
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    with pytest.raises(OSError, match="No such file"):
        map_base(file, device="cpu")
    assert mapped is not None
    assert mapped.tensors["a"].tolist() == [1.0] * 4, "its readers keep the memory"
    file.write_text(file.read_text().replace(f'"pid":{pid}', f'"pid":{os.getpid()}'))
    with pytest.raises(OSError, match=r"No such file|no longer the owner|Permission denied|No such device"):
        map_base(file, device="cpu")


def test_an_owner_sees_whether_a_process_that_maps_its_base_lives(tmp_path: Path) -> None:
    owner, file = BaseOwner([("a", "F32", (4,))], lambda name: torch.ones(4), device="cpu"), tmp_path / "base.json"
    owner.offer(file, digest="d")
    assert not owner.is_mapped()

    def use() -> None:
        map_base(file, device="cpu")
        signal.pause()

    pid = forked(use)
    while not owner.is_mapped():
        assert os.waitpid(pid, os.WNOHANG) == (0, 0)
        time.sleep(0.01)
    file.unlink()
    assert owner.is_mapped(), "even if the file was removed"
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert not owner.is_mapped()


class PlainBlock:
    """Satisfies `Block`, without the kernel's protection, like memory of a GPU."""

    def __init__(self, _device: str, num_bytes: int) -> None:
        self.data = torch.zeros(num_bytes, dtype=torch.uint8)

    def write(self, start: int, values: Tensor) -> None:
        data = values.reshape(-1).view(torch.uint8)
        self.data[start : start + len(data)] = data

    def finish(self) -> tuple[Tensor, dict[str, Any]]:
        return self.data, {}


def test_a_base_that_was_changed_is_noticed_by_its_owner_and_by_each_process_that_maps_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base_module, "new_block", PlainBlock)
    owner = BaseOwner([("a", "BF16", (3, 5))], lambda name: torch.ones(3, 5), device="cpu")
    monkeypatch.setattr(base_module, "open_block", lambda handle: owner._bytes)
    owner.offer(tmp_path / "base.json", digest="d")
    owner.check()
    assert map_base(tmp_path / "base.json", device="cpu") is not None
    owner.tensors["a"][1, 2] += 0.01
    with pytest.raises(WeightsError, match="was changed while the run used it"):
        owner.check()
    with pytest.raises(WeightsError, match="does not have the bytes that were loaded"):
        map_base(tmp_path / "base.json", device="cpu")
    with pytest.raises(WeightsError, match="is on cpu, and this process computes on meta"):
        map_base(tmp_path / "base.json", device="meta")


@given(size=st.integers(1, 64), at=st.integers(0, 511), change=st.integers(1, 255), seed=st.integers(0, 9))
def test_the_checksum_differs_if_a_byte_differs_or_words_change_places(
    size: int, at: int, change: int, seed: int
) -> None:
    block = torch.randint(0, 256, (8 * size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    changed = block.clone()
    changed[at % len(block)] += change
    assert checksum(changed) != checksum(block)
    if size > 1 and not torch.equal(block[:8], block[-8:]):
        assert checksum(torch.cat([block[-8:], block[8:-8], block[:8]])) != checksum(block)


def test_the_checksum_covers_blocks_of_several_parts() -> None:
    block = torch.zeros(8 * (CHECKED_WORDS + 3), dtype=torch.uint8)
    before = checksum(block)
    block[-1] = 1
    assert checksum(block) != before


def test_a_refused_base_is_loaded_by_each_process_itself(model_dir: Path, tmp_path: Path) -> None:
    refuse_base(tmp_path / "base.json", "its files are quantised")
    assert map_base(tmp_path / "base.json", device="cpu") is None
    learner = initial_learner(model_dir, lora(), shared_base=tmp_path / "base.json")
    assert learner.model.digest() == initial_learner(model_dir, lora()).model.digest()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda d: (d / "adapter_config.json").write_text("{}"), "is a PEFT directory"),
        (lambda d: with_config(d, quantization_config={"quant_method": "fp8"}), "quantised"),
    ],
)
def test_a_model_of_which_trainer_and_engine_hold_other_weights_is_refused(
    model_dir: Path, change: Callable[[Path], object], reason: str
) -> None:
    change(model_dir)
    with pytest.raises(NotSharedError, match=reason):
        own_base(model_dir, dtype="float32", device="cpu")


def with_config(directory: Path, **settings: object) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))


def test_a_base_that_lacks_weights_says_so(model_dir: Path) -> None:
    tensors = load_file(model_dir / "model.safetensors")
    tensors.pop("model.norm.weight")
    save_file(tensors, model_dir / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(RunError, match=r"its files lack 1 weights of a llama model, such as model\.norm\.weight"):
        own_base(model_dir, dtype="float32", device="cpu")


def test_fused_projections_are_next_to_each_other_and_all_weights_are_aligned() -> None:
    with torch.device("meta"):
        model: Any = nn.ModuleDict(
            {name: nn.Linear(8, 8) for name in ("k_proj", "up_proj", "v_proj", "o_proj", "q_proj", "gate_proj")}
        )
    headers = [(f"layers.{n}.{name}", "F32", (1,)) for n in range(2) for name, _ in model.named_parameters()]
    names = [name for name, _, _ in in_order(headers)]
    for layer in range(2):
        for kind in ("weight", "bias"):
            for group in (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")):
                at = names.index(f"layers.{layer}.{group[0]}.{kind}")
                assert names[at : at + len(group)] == [f"layers.{layer}.{part}.{kind}" for part in group]
    assert sorted(names) == sorted(name for name, _, _ in headers)
    owner = BaseOwner(headers, lambda name: torch.zeros(1), device="cpu")
    assert all(tensor.data_ptr() % ALIGNMENT == 0 for tensor in owner.tensors.values())
