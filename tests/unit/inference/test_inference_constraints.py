"""Constrained completions: every token is allowed, and its logprob is that of the distribution it was drawn from."""

import asyncio
import json
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from rollbook.contracts.output_formats import (
    choice_grammar,
    forced_tools,
    json_grammar,
    parse_tool_calls,
    tool_call_grammar,
)
from rollbook.contracts.policy import SamplingParams
from rollbook.inference.engine import GenerationError
from rollbook.inference.request import BadRequestError
from rollbook.inference.server.grammars import LlguidanceCompiler
from tests.parts.inference.engines import BYTES_PER_TOKEN, TinyModel, embedded, some_prompts
from tests.parts.inference.models import MAX_LEN, VOCAB
from tests.parts.rollout.agents import word_tokenizer

TIGHT_MB = (MAX_LEN + 4 * 64) * BYTES_PER_TOKEN["llama"] / 1e6


class EveryThird:
    """Allows a third of the vocabulary, which depends on the tokens before. Fails after `fails_at` tokens."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.tokens: list[int] = []
        self._fails_at = fails_at

    def mask(self, tokens: list[int]) -> NDArray[np.bool_]:
        return np.equal(np.arange(VOCAB) % 3, (sum(tokens) + len(tokens)) % 3)

    def allowed(self) -> NDArray[np.uint8]:
        if len(self.tokens) == self._fails_at:
            raise GenerationError("too complex")
        return np.packbits(self.mask(self.tokens), bitorder="little")

    def accept(self, token_id: int) -> None:
        self.tokens.append(token_id)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return TinyModel(root=tmp_path_factory.mktemp("constraints"))


@pytest.mark.parametrize(
    "options", [{}, {"is_captured": True, "steps_ahead": 2}, {"kv_memory_mb": TIGHT_MB, "prefix_cache_share": 0.0}]
)
async def test_constrained_and_free_requests_share_any_schedule_and_have_exact_logprobs(
    tiny: TinyModel, options: dict[str, Any]
) -> None:
    prompts = some_prompts(6, 3, 30)
    samplings = [SamplingParams(max_tokens=60, seed=n, temperature=0.7, top_logprobs=2 * (n % 2)) for n in range(6)]
    constraints = [EveryThird() if n % 3 else None for n in range(6)]
    async with embedded(tiny, **options) as engine:
        alone = await asyncio.gather(*map(engine.generate, prompts[::3], samplings[::3]))
        completions = await asyncio.gather(
            *(
                engine.submit(prompt, sampling, constraint=constraint)
                for prompt, sampling, constraint in zip(prompts, samplings, constraints, strict=True)
            )
        )
    for free, one in zip(completions[::3], alone, strict=True):
        assert free.token_ids.tolist() == one.token_ids.tolist()
    model = tiny.model(1)
    for prompt, constraint, completion in zip(prompts, constraints, completions, strict=True):
        tokens = completion.token_ids.tolist()
        with torch.inference_mode():
            logits_TV = (
                model(input_ids=torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1].float() / 0.7
            )
        if constraint is not None:
            assert constraint.tokens == tokens
            masks_TV = torch.from_numpy(np.stack([constraint.mask(tokens[:at]) for at in range(len(tokens))]))
            logits_TV = logits_TV.masked_fill(~masks_TV, float("-inf"))
        expected = torch.log_softmax(logits_TV, dim=-1)
        chosen = expected[torch.arange(len(tokens)), torch.tensor(tokens)]
        assert completion.logprobs == pytest.approx(chosen.numpy(), abs=1e-3)
        if completion.tops is not None:
            assert completion.tops.logprobs == pytest.approx(expected.topk(2).values.numpy(), abs=1e-3)


async def test_a_constraint_that_fails_ends_its_own_request_only(tiny: TinyModel) -> None:
    first, second = some_prompts(2, 5, 10)
    sampling = SamplingParams(max_tokens=10, seed=1)
    async with embedded(tiny) as engine:
        failing = engine.submit(first, sampling, constraint=EveryThird(fails_at=4))
        other = engine.submit(second, sampling, constraint=EveryThird())
        with pytest.raises(GenerationError, match="too complex"):
            await failing
        assert len((await other).token_ids) == 10


SCHEMAS = st.recursive(
    st.sampled_from(
        [
            {"type": "boolean"},
            {"type": "null"},
            {"enum": ["a", 'quote"d', "späce and / slash", 3]},
            {"type": "integer", "minimum": -5, "maximum": 120},
        ]
    ),
    lambda inner: (
        st.dictionaries(st.sampled_from(["a", "b/c", 'q"', "name"]), inner, max_size=3).map(
            lambda fields: {
                "type": "object",
                "properties": fields,
                "required": list(fields),
                "additionalProperties": False,
            }
        )
        | inner.map(lambda item: {"type": "array", "items": item, "minItems": 1, "maxItems": 2})
    ),
    max_leaves=5,
)


def conforms(value: Any, schema: Any) -> bool:
    match schema:
        case {"type": "object", "properties": fields}:
            return list(value) == list(fields) and all(conforms(value[name], fields[name]) for name in fields)
        case {"type": "array", "items": item}:
            return 1 <= len(value) <= 2 and all(conforms(one, item) for one in value)
        case {"type": "boolean"}:
            return isinstance(value, bool)
        case {"type": "null"}:
            return value is None
        case {"type": "integer"}:
            return isinstance(value, int) and -5 <= value <= 120
    return value in schema["enum"]


TOKENIZER = word_tokenizer()
COMPILER = LlguidanceCompiler(TOKENIZER, vocab_size=TOKENIZER.vocab_size + 5)


def random_text(grammar: str, seed: int) -> str:
    """Tokens drawn among the allowed ones until the end token, as text."""
    rng, constraint, tokens = (
        np.random.default_rng(seed),
        COMPILER.compile(grammar, field="grammar").copy(),
        list[int](),
    )
    while not tokens or tokens[-1] not in TOKENIZER.eos_token_ids:
        allowed = np.flatnonzero(np.unpackbits(constraint.allowed(), bitorder="little"))
        tokens.append(int(rng.choice(allowed)))
        constraint.accept(tokens[-1])
    return TOKENIZER.decode(tokens)


@settings(max_examples=60)
@given(schema=SCHEMAS, seed=st.integers(0, 1000))
def test_every_walk_through_a_schema_is_json_of_that_schema(schema: dict[str, Any], seed: int) -> None:
    text = random_text(json_grammar(schema), seed)
    assert conforms(json.loads(text), schema), text


@settings(max_examples=60)
@given(schema=SCHEMAS, seed=st.integers(0, 1000), is_single=st.booleans())
def test_every_walk_through_tools_is_a_valid_call(schema: dict[str, Any], seed: int, is_single: bool) -> None:
    arguments = {"type": "object", "properties": {"x": schema}, "required": ["x"], "additionalProperties": False}
    tools = [
        {"type": "function", "function": {"name": "plain"}},
        {"type": "function", "function": {"name": "get-it", "parameters": arguments}},
    ]
    chosen = forced_tools(tools, {"type": "function", "function": {"name": "get-it"}})
    text = random_text(tool_call_grammar(chosen, is_single=is_single), seed)
    rest, calls = parse_tool_calls(text)
    assert rest.strip() == ""
    assert calls
    assert len(calls) == 1 or not is_single
    assert all(call.name == "get-it" and conforms(json.loads(call.arguments)["x"], schema) for call in calls)


def test_a_choice_is_one_of_its_texts() -> None:
    choices = ["yes", "no", 'it "depends"\n']
    assert {random_text(choice_grammar(choices), seed) for seed in range(20)} <= set(choices)


def test_a_schema_that_is_not_supported_names_the_field() -> None:
    with pytest.raises(BadRequestError, match=r"response_format: the grammar is not supported: .*number"):
        COMPILER.compile(json_grammar({"type": "numberish"}), field="response_format")


@pytest.mark.parametrize(
    ("tools", "choice", "message"),
    [
        ([], "required", "requires tools"),
        ([{"type": "function", "function": {"name": "a"}}], "always", "not auto, none, required"),
        (
            [{"type": "function", "function": {"name": "a"}}],
            {"type": "function", "function": {"name": "b"}},
            "'b' is not among",
        ),
    ],
)
def test_an_impossible_tool_choice_is_refused(tools: list[Any], choice: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        forced_tools(tools, choice)


def test_a_grammar_that_would_take_long_to_compile_is_refused() -> None:
    alternatives = "|".join("a" * length for length in range(1, 600))
    with pytest.raises(BadRequestError, match=r"structured_outputs: the grammar has \d+ characters; at most"):
        COMPILER.compile(f"start: /({alternatives})/", field="structured_outputs")
