"""Model families other than Llama in the trainer: packing, experts and their routers, adapters of experts, names of weights, and
text parts of multimodal checkpoints."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

from rollbook.contracts.errors import RunError
from rollbook.inference.engines.embedded.model.module import load_module
from rollbook.trainer.checkpoints.checkpoints import initial_learner
from rollbook.trainer.config import LoraSettings
from rollbook.trainer.data.minibatches import plan
from rollbook.trainer.data.rows import flatten
from rollbook.trainer.model.packed_attention import NAME as PACKED_ATTENTION
from rollbook.trainer.model.policy_model import PolicyModel
from rollbook.trainer.model.routers import Routers, is_router
from tests.models.families import EXPERTS, Family, family
from tests.models.survey import leaks
from tests.parts.trainer.batches import batch_of, one_pass, quick, recorded_batch, row, sample

VISION: dict[str, dict[str, Any]] = {
    "gemma3": {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
    }
    | {"patch_size": 14},
    "qwen3_5": {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
    | {"patch_size": 4, "num_position_embeddings": 16},
}


@pytest.fixture
def mixture(tmp_path: Path) -> Path:
    family("qwen3_moe").model().save_pretrained(tmp_path / "mixture")
    return tmp_path / "mixture"


@pytest.mark.parametrize(
    ("kind", "is_packed"),
    [
        ("qwen3_moe", True),
        ("gemma3_text", True),  # windows
        ("gpt_oss", True),  # windows and sinks
        ("llama4_text", False),  # chunks
        ("qwen3_5_text", True),  # gated delta
        ("falcon_h1", False),  # Mamba next to attention
        ("lfm2", False),  # convolutions
        ("deepseek_v32", False),  # sparse attention
        ("gemma3n_text", False),  # shared keys
    ],
)
def test_a_loss_has_no_gradient_at_tokens_of_other_sequences(kind: str, is_packed: bool) -> None:
    model = PolicyModel(family(kind).model(), quick())
    assert model.is_packed is is_packed
    assert not leaks(model)


def test_a_pass_of_sequences_that_see_each_other_is_found() -> None:
    model = PolicyModel(family("lfm2").model(), quick())
    # A convolution reads the end of the sequence before it.
    model.is_packed, model.attention_kernel = True, "equal"
    model.network.language_model.set_attn_implementation(PACKED_ATTENTION)
    assert leaks(model)


def test_weights_are_published_and_saved_under_the_names_of_the_files(mixture: Path, tmp_path: Path) -> None:
    files = load_file(mixture / "model.safetensors")
    assert "model.layers.0.mlp.experts.3.down_proj.weight" in files
    model = PolicyModel.load(mixture, quick())
    assert "model.layers.0.mlp.experts.down_proj" in model.module.state_dict()
    published = model.snapshot()
    assert published.keys() == files.keys()
    assert all(torch.equal(published[name], files[name]) for name in files)
    model.save(tmp_path / "saved")
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert saved.keys() == files.keys()
    assert PolicyModel.load(tmp_path / "saved", quick()).digest() == model.digest()


def test_merged_adapters_of_experts_are_the_policy_that_was_trained(mixture: Path) -> None:
    model = PolicyModel.load(mixture, quick(lora=LoraSettings(rank=2, experts=True)))
    with torch.no_grad():
        for name, parameter in model.module.named_parameters():
            if ".lora_" in name:
                parameter.normal_(0.0, 0.2)
    assert any(".experts." in name and ".lora_" in name for name, _ in model.module.named_parameters())
    rows = one_pass([[5, 6, 7, 8], [9, 3, 4, 5]], [0, 1, 2, 6], [6, 7, 8, 5])
    expected = model.token_logprobs(rows)[0].detach()
    with model.adapters_off():
        assert not torch.allclose(model.token_logprobs(rows)[0], expected, atol=1e-3)
    merged = family("qwen3_moe").model(seed=9)
    merged.save_pretrained(mixture, state_dict=dict(model.weights()), save_original_format=False)
    found = PolicyModel.load(mixture, quick()).token_logprobs(rows)[0].detach()
    assert torch.allclose(found, expected, atol=1e-4)


def test_experts_and_routers_are_adapted_only_on_request(mixture: Path, tmp_path: Path) -> None:
    def adapted(directory: Path, **settings: Any) -> str:
        model = PolicyModel.load(directory, quick(lora=LoraSettings(rank=2, **settings)))
        return " ".join(model.checkpointed_weights())

    assert "q_proj" in adapted(mixture)
    assert "experts" not in adapted(mixture)
    assert "gate" not in adapted(mixture)
    assert "experts" in adapted(mixture, experts=True)
    family("gpt_oss").model().save_pretrained(tmp_path / "other")
    assert "experts" in adapted(tmp_path / "other", experts=True)
    family("qwen3").model().save_pretrained(tmp_path / "dense")
    with pytest.raises(RunError, match="the model has no experts"):
        adapted(tmp_path / "dense", experts=True)


def test_the_router_loss_balances_the_load_and_is_off_by_default(mixture: Path) -> None:
    loads = {}
    for weight in (0.0, 20.0):
        learner = initial_learner(mixture, quick(router_loss=weight, lr=2e-3, max_grad_norm=1e6))
        reports = [learner.run(recorded_batch(step)) for step in range(1, 9)]
        loads[weight] = [report.metrics["train/expert_load_max"] or 0.0 for report in reports]
    assert loads[0.0][0] == loads[20.0][0]
    assert 1.0 <= loads[20.0][-1] < loads[0.0][-1]


def test_frozen_routers_do_not_change_and_their_experts_do(mixture: Path) -> None:
    learner = initial_learner(mixture, quick(freeze_routers=True))
    before = learner.model.snapshot()
    learner.run(recorded_batch(1))
    changed = {name for name, tensor in learner.model.snapshot().items() if not torch.equal(tensor, before[name])}
    assert not any(name.endswith("mlp.gate.weight") for name in changed)
    assert any(".experts." in name for name in changed)


def test_an_even_load_is_one_and_a_single_expert_has_all_of_it() -> None:
    model = family("qwen3_moe").model()
    routers = Routers(model)
    ids = torch.arange(3, 63).view(1, -1)
    with torch.no_grad():
        for part in model.modules():
            if is_router(part):
                part.weight.zero_()
        model(input_ids=ids)
        # Equal logits: the first two of four experts are always chosen, with probability 1/4 each.
        assert float(routers.largest_load() or 0) == 2.0
        assert float(routers.balance_loss() or 0) == pytest.approx(1.0)
    assert not Routers(family("llama").model())


def test_padding_is_no_load_of_an_expert() -> None:
    config = quick(packing="padded")
    model = PolicyModel(family("qwen3_moe").model(), config)
    samples = [sample(row(list(range(start, start + 3 * start)), [start])) for start in (3, 9)]
    (minibatch,) = plan(flatten(batch_of(1, [samples]), config), config, step=1, is_packed=False)
    (padded,) = minibatch.microbatches
    assert padded.is_padding_BT is not None
    terms = []
    for token in (0, 99):
        inputs_BT = np.where(padded.is_padding_BT, token, padded.inputs_BT)
        for is_known in (True, False):
            with torch.no_grad():
                model.token_logprobs(
                    replace(padded, inputs_BT=inputs_BT, is_padding_BT=padded.is_padding_BT if is_known else None)
                )
                terms.append((float(model.routers.largest_load() or 0), float(model.routers.balance_loss() or 0)))
    assert terms[0] == terms[2]
    assert terms[1] != terms[3]


@pytest.mark.parametrize(
    ("kind", "reason"),
    [("qwen3", "it has no routers of experts"), ("llama4_text", "its routers do not return their choices")],
)
def test_a_router_loss_that_would_have_no_effect_is_refused(kind: str, reason: str) -> None:
    with pytest.raises(RunError, match=f"{reason}. Set trainer.router_loss = 0"):
        PolicyModel(family(kind).model(), quick(router_loss=0.1))
    PolicyModel(family(kind).model(), quick(router_loss=0.1), is_reference=True)


def test_the_flops_of_a_mixture_are_those_of_the_chosen_experts() -> None:
    shapes = [
        PolicyModel(Family("", "qwen3_moe", {**EXPERTS, "num_experts_per_tok": used}).model(), quick()).shape
        for used in (1, 2, 4)
    ]
    counts = [shape.body_parameters for shape in shapes]
    # Two layers, three matrices of 32 x 24 in each expert.
    assert counts[2] - counts[1] == 2 * (counts[1] - counts[0]) == 2 * (2 * 3 * 32 * 24)
    assert (
        shapes[2].body_parameters + 2 * shapes[2].head_parameters
        == PolicyModel(Family("", "qwen3_moe", EXPERTS).model(), quick()).num_parameters
    )


@pytest.mark.parametrize("kind", sorted(VISION))
def test_the_text_part_of_a_multimodal_checkpoint_loads_as_a_text_model(tmp_path: Path, kind: str) -> None:
    text = family(f"{kind}_text")
    config: Any = AutoConfig.for_model(kind, text_config=text.config().to_dict(), vision_config=VISION[kind])
    classes: Any = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    whole: Any = classes[type(config)](config).eval()
    whole.save_pretrained(tmp_path)
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        expected = whole(input_ids=ids).logits
        model = PolicyModel.load(tmp_path, quick())
        assert torch.allclose(model.network.language_model(input_ids=ids).logits, expected, atol=1e-5)
        served, _ = load_module(tmp_path, device="cpu", dtype="float32", max_model_len=None)
        assert torch.allclose(served(input_ids=ids).logits, expected, atol=1e-5)
    files = load_file(tmp_path / "model.safetensors")
    assert set(model.weights()) <= set(files)
    assert not any("vision" in name or "visual" in name for name in model.weights())


def test_a_checkpoint_that_lacks_weights_is_refused_instead_of_initialised(tmp_path: Path) -> None:
    whole = family("qwen3").model()
    weights = whole.state_dict()
    del weights["model.layers.1.mlp.up_proj.weight"]
    whole.save_pretrained(tmp_path, state_dict=weights)
    with pytest.raises(RunError, match=r"lack 1 weights.*layers\.1\.mlp\.up_proj"):
        PolicyModel.load(tmp_path, quick())
    with pytest.raises(RunError, match=r"lack 1 weights.*layers\.1\.mlp\.up_proj"):
        load_module(tmp_path, device="cpu", dtype="float32", max_model_len=None)
