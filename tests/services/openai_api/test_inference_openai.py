"""The official openai client against `rollbook policy serve`: completions, chats, streams, scores and errors."""

import asyncio
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import openai
import pytest

from rollbook.rollout.chat.tokenizer import ModelTokenizer
from rollbook.trainer.model_config import SPECIAL_TOKENS
from tests.parts.inference.chat_model import MAX_LEN
from tests.services.openai_api.conftest import ROOT, PolicyProcess, policy_process

AGENTS_PYTHON = ROOT / ".venvs" / "agents" / "bin" / "python"


TOOL: Any = {
    "type": "function",
    "function": {"name": "look_up", "description": "…", "parameters": {"type": "object", "properties": {}}},
}


def test_a_text_completion_has_text_logprobs_offsets_and_usage(
    client: openai.OpenAI, tokenizer: ModelTokenizer
) -> None:
    reply = client.completions.create(
        model="tiny", prompt="hello", max_tokens=12, logprobs=0, seed=5, extra_body={"return_token_ids": True}
    )
    choice: Any = reply.choices[0]
    assert reply.usage is not None
    assert reply.usage.prompt_tokens == len(tokenizer.encode("hello"))
    assert reply.usage.completion_tokens == len(choice.token_ids)
    assert choice.text == tokenizer.decode(choice.token_ids)
    assert len(choice.logprobs.tokens) == len(choice.logprobs.token_logprobs) == len(choice.token_ids)
    assert choice.logprobs.text_offset[0] == 0
    assert sorted(choice.logprobs.text_offset) == choice.logprobs.text_offset
    assert choice.prompt_token_ids == tokenizer.encode("hello")
    assert choice.weight_versions == [{"version": 0, "start": 0, "end": len(choice.token_ids)}]


def test_a_prompt_as_token_ids_and_as_text_gives_the_same_completion(
    client: openai.OpenAI, tokenizer: ModelTokenizer
) -> None:
    by_text = client.completions.create(model="tiny", prompt="abc", max_tokens=20, seed=3)
    by_ids = client.completions.create(model="tiny", prompt=tokenizer.encode("abc"), max_tokens=20, seed=3)
    several = client.completions.create(model="tiny", prompt=["abc", "xyz"], max_tokens=20, seed=3)
    assert by_text.choices[0].text == by_ids.choices[0].text == several.choices[0].text
    assert len(several.choices) == 2


def test_a_seed_repeats_the_completions_and_n_gives_different_ones(client: openai.OpenAI) -> None:
    def sample(n: int, seed: int) -> list[str]:
        return [
            c.text for c in client.completions.create(model="tiny", prompt="q", max_tokens=16, n=n, seed=seed).choices
        ]

    first = sample(4, 11)
    assert sample(4, 11) == first
    assert len(set(first)) == 4
    assert sample(1, 11) == first[:1]
    assert sample(4, 12) != first


def test_chat_renders_the_template_and_returns_logprobs_with_bytes(
    client: openai.OpenAI, tokenizer: ModelTokenizer
) -> None:
    messages: Any = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
    ]
    reply: Any = client.chat.completions.create(
        model="tiny",
        messages=messages,
        max_completion_tokens=24,
        logprobs=True,
        seed=2,
        extra_body={"return_token_ids": True, "top_k": 50},
    )
    choice = reply.choices[0]
    assert tokenizer.decode(reply.prompt_token_ids) == "<system>be brief\n<user>hi\n<assistant>"
    assert choice.message.role == "assistant"
    sampled = choice.token_ids
    written = b"".join(bytes(entry.bytes) for entry in choice.logprobs.content if entry.token not in SPECIAL_TOKENS)
    assert len(choice.logprobs.content) == len(sampled)
    assert choice.message.content == written.decode(errors="replace")
    assert all(entry.logprob <= 0 and entry.top_logprobs == [] for entry in choice.logprobs.content)


def test_alternatives_of_completions_are_dicts_that_include_the_sampled_token(client: openai.OpenAI) -> None:
    body: Any = {"model": "tiny", "prompt": "hello", "max_tokens": 8, "seed": 5, "logprobs": 4}
    whole: Any = client.completions.create(**body).choices[0].logprobs
    assert len(whole.top_logprobs) == len(whole.tokens) == 8
    for token, logprob, tops in zip(whole.tokens, whole.token_logprobs, whole.top_logprobs, strict=True):
        assert tops[token] == pytest.approx(logprob) or token == "\ufffd"
        assert len(tops) in (4, 5) or "\ufffd" in tops
        assert list(tops.values())[:3] == sorted(list(tops.values())[:3], reverse=True)
    streamed: list[Any] = []
    for chunk in client.completions.create(**body, stream=True):
        streamed += (chunk.choices[0].logprobs or whole).top_logprobs or []
    assert streamed == whole.top_logprobs
    narrow: Any = client.completions.create(**{**body, "logprobs": 20}, extra_body={"top_k": 2})
    # Impossible tokens are omitted. Two tokens that are parts of a character may have the same text.
    assert all(1 <= len(tops) <= 2 for tops in narrow.choices[0].logprobs.top_logprobs)


def test_echo_scores_the_tokens_of_a_prompt_as_they_were_scored_when_sampled(client: openai.OpenAI) -> None:
    # Long enough for several forwards.
    question, answer = (
        "2 + 2 = " * 40,
        client.completions.create(model="tiny", prompt="2 + 2 = " * 40, max_tokens=8, seed=3, logprobs=2),
    )
    sampled: Any = answer.choices[0].logprobs
    sampled_ids: Any = client.completions.create(
        model="tiny", prompt=question, max_tokens=8, seed=3, extra_body={"return_token_ids": True}
    ).choices[0]
    whole = [*sampled_ids.prompt_token_ids, *sampled_ids.token_ids]
    body: Any = {"model": "tiny", "prompt": whole, "echo": True, "logprobs": 2}
    scored: Any = client.completions.create(**body, max_tokens=0).choices[0]
    assert scored.text == question + answer.choices[0].text
    assert scored.finish_reason == "length"
    block = scored.logprobs
    assert len(block.tokens) == len(block.token_logprobs) == len(block.top_logprobs) == len(block.text_offset)
    assert (block.token_logprobs[0], block.top_logprobs[0], block.text_offset[0]) == (None, None, 0)
    assert block.token_logprobs[-8:] == pytest.approx(sampled.token_logprobs, abs=1e-4)
    assert block.tokens[-8:] == sampled.tokens
    # With tokens to sample the completion follows the prompt, whole and streamed.
    longer: Any = client.completions.create(**body, max_tokens=2, n=2, seed=1)
    assert [len(choice.logprobs.tokens) for choice in longer.choices] == [len(whole) + 2] * 2
    assert longer.choices[0].logprobs.token_logprobs[1:-2] == pytest.approx(block.token_logprobs[1:])
    chunks: list[Any] = list(client.completions.create(**body, max_tokens=2, n=1, seed=1, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == longer.choices[0].text
    offsets = [
        offset for chunk in chunks if chunk.choices[0].logprobs for offset in chunk.choices[0].logprobs.text_offset
    ]
    assert offsets == longer.choices[0].logprobs.text_offset


def test_alternatives_of_a_chat_are_sorted_lists_of_the_sampling_distribution(client: openai.OpenAI) -> None:
    body: Any = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 6, "seed": 3}
    warm: Any = client.chat.completions.create(**body, logprobs=True, top_logprobs=20, temperature=0.7)
    for entry in warm.choices[0].logprobs.content:
        logprobs = [top.logprob for top in entry.top_logprobs]
        assert len(logprobs) == 20
        assert logprobs == sorted(logprobs, reverse=True)
        same = [top.logprob for top in entry.top_logprobs if top.token == entry.token]
        assert not same or any(value == pytest.approx(entry.logprob, abs=1e-5) for value in same)
    greedy: Any = client.chat.completions.create(**body, logprobs=True, top_logprobs=1, temperature=0)
    assert all(e.top_logprobs[0].logprob == pytest.approx(e.logprob) for e in greedy.choices[0].logprobs.content)


def test_a_second_turn_reports_the_cached_part_of_its_prompt(client: openai.OpenAI) -> None:
    first: list[Any] = [{"role": "user", "content": "tell me about the number seven, at length"}]
    opening: Any = client.chat.completions.create(
        model="tiny", messages=first, max_tokens=12, extra_body={"ignore_eos": True}
    )
    longer = [*first, {"role": "assistant", "content": "it is odd"}, {"role": "user", "content": "go on"}]
    reply: Any = client.chat.completions.create(model="tiny", messages=longer, max_tokens=2)
    cached = reply.usage.prompt_tokens_details.cached_tokens
    assert opening.usage.prompt_tokens - 16 < cached < reply.usage.prompt_tokens


@pytest.mark.parametrize("stop", [None, ["e", "qu"]])
def test_a_stream_has_the_same_content_as_the_whole_response(client: openai.OpenAI, stop: list[str] | None) -> None:
    body: Any = {"model": "tiny", "prompt": "once", "max_tokens": 60, "seed": 9, "stop": stop, "n": 2}
    extra: Any = {"return_token_ids": True}
    whole: Any = client.completions.create(**body, logprobs=0, extra_body=extra)
    texts, ids, ends, usage = ["", ""], [list[int](), list[int]()], [None, None], None
    stream: Any = client.completions.create(
        **body, logprobs=0, stream=True, stream_options={"include_usage": True}, extra_body=extra
    )
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            ids[choice.index] += choice.token_ids
            ends[choice.index] = choice.finish_reason or ends[choice.index]
    assert texts == [choice.text for choice in whole.choices]
    assert ids == [choice.token_ids for choice in whole.choices]
    assert ends == [choice.finish_reason for choice in whole.choices]
    assert usage == whole.usage
    if stop:
        assert not any(word in text for word in stop for text in texts)


def test_a_chat_stream_has_the_same_content_as_the_whole_response(client: openai.OpenAI) -> None:
    body: Any = {"model": "tiny", "messages": [{"role": "user", "content": "tell"}], "max_tokens": 40, "seed": 4}
    whole = client.chat.completions.create(**body)
    chunks: list[Any] = list(client.chat.completions.create(**body, stream=True, logprobs=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == whole.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    logprobs = [entry for c in chunks if c.choices[0].logprobs for entry in c.choices[0].logprobs.content]
    assert whole.usage is not None
    assert len(logprobs) == whole.usage.completion_tokens


def test_a_stop_string_across_tokens_ends_the_text_before_it(client: openai.OpenAI) -> None:
    for seed in range(40):
        body: Any = {"model": "tiny", "prompt": "once", "max_tokens": 60, "seed": seed}
        free: Any = client.completions.create(**body, extra_body={"return_token_ids": True})
        text = free.choices[0].text
        # A random model seldom writes whole characters. Find a seed with a pair of characters that occurs once.
        places = [
            i for i in range(5, len(text) - 8) if text[i : i + 2].isprintable() and text.find(text[i : i + 2]) == i
        ]
        at = next((i for i in places if "\ufffd" not in text[i : i + 2]), None)
        if at is not None:
            break
    assert at is not None
    stopped: Any = client.completions.create(**body, stop=text[at : at + 2], extra_body={"return_token_ids": True})
    choice = stopped.choices[0]
    assert choice.text == text[:at]
    assert choice.finish_reason == "stop"
    assert choice.stop_reason == text[at : at + 2]
    assert free.choices[0].token_ids[: len(choice.token_ids)] == choice.token_ids
    assert len(choice.token_ids) < len(free.choices[0].token_ids)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"model": "gpt-9"}, openai.NotFoundError, "gpt-9"),
        ({"temperature": -1}, openai.BadRequestError, "temperature"),
        ({"prompt": [1, 99_999]}, openai.BadRequestError, "vocabulary"),
        ({"prompt": "x" * (MAX_LEN + 1)}, openai.BadRequestError, "max_model_len"),
        ({"max_tokens": 0}, openai.BadRequestError, "max_tokens"),
        ({"echo": True, "max_tokens": 0, "stream": True}, openai.BadRequestError, "stream"),
        ({"stop": [""]}, openai.BadRequestError, "stop"),
        ({"extra_body": {"no_such": 1}}, openai.BadRequestError, "no_such"),
    ],
)
def test_invalid_input_raises_the_error_of_the_client_and_names_the_field(
    client: openai.OpenAI, changes: dict[str, Any], error: type[openai.APIStatusError], message: str
) -> None:
    base: dict[str, Any] = {"model": "tiny", "prompt": "x", "max_tokens": 2}
    with pytest.raises(error, match=message):
        client.completions.create(**{**base, **changes})
    assert client.completions.create(model="tiny", prompt="x", max_tokens=1).choices


def test_chat_rejects_unsupported_features(client: openai.OpenAI) -> None:
    hello: Any = [{"role": "user", "content": "x"}]
    picture: Any = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
    refused: list[Any] = [
        {"messages": []},
        {"messages": picture},
        {"messages": hello, "tool_choice": "required"},
        {"messages": hello, "tool_choice": {"type": "function", "function": {"name": "other"}}, "tools": [TOOL]},
        {"messages": hello, "response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
        {"messages": hello, "extra_body": {"structured_outputs": {"regex": "(", "choice": ["a"]}}},
        {"messages": hello, "extra_body": {"structured_outputs": {"regex": "("}}},
        {"messages": hello, "logprobs": True, "top_logprobs": 21},
        {"messages": hello, "top_logprobs": 3},
        {"messages": [{"role": "assistant", "content": "x", "tool_calls": 5}]},
        {"messages": [{"role": "assistant", "content": "x", "tool_calls": [{"function": "f"}]}]},
        {"messages": hello, "tool_choice": "required", "tools": [{"type": "function"}]},
        {"messages": hello, "tool_choice": "required", "tools": [{"function": {"name": "f", "parameters": 7}}]},
        {"messages": hello, "extra_body": {"structured_outputs": {"json": "[1]"}}},
        {"messages": hello, "extra_body": {"structured_outputs": {"grammar": ""}}},
    ]
    for body in refused:
        with pytest.raises(openai.BadRequestError):
            client.chat.completions.create(model="tiny", **body)


NEUTRAL = {
    "presence_penalty": 0,
    "repetition_penalty": 1.0,
    "min_p": 0.0,
    "min_tokens": 0,
    "include_stop_str_in_output": False,
    "bad_words": [],
    "use_beam_search": False,
    "length_penalty": 1.0,
    "priority": 0,
    "spaces_between_special_tokens": True,
    "skip_special_tokens": True,
    "prompt_cache_key": "mine",
    "safety_identifier": "me",
}
"""Fields that clients of vLLM and OpenAI send with their defaults."""


def test_default_values_of_other_servers_change_nothing(client: openai.OpenAI) -> None:
    plain = client.completions.create(model="tiny", prompt="abc", max_tokens=8, seed=3)
    given = client.completions.create(model="tiny", prompt="abc", max_tokens=8, seed=3, extra_body=NEUTRAL)
    assert given.choices[0].text == plain.choices[0].text
    chat = {"continue_final_message": False, "documents": [], "modalities": ["text"], "verbosity": "medium"}
    client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "x"}], max_tokens=2, extra_body={**NEUTRAL, **chat}
    )


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("repetition_penalty", 1.2),
        ("min_p", 0.1),
        ("min_tokens", 4),
        ("include_stop_str_in_output", True),
        ("bad_words", ["no"]),
        ("allowed_token_ids", [1]),
        ("prompt_logprobs", 1),
        ("truncate_prompt_tokens", 4),
        ("use_beam_search", True),
        ("length_penalty", 2.0),
        ("chat_template", "x"),
        ("continue_final_message", True),
        ("a_field_of_tomorrow", 1),
    ],
)
def test_a_field_that_would_change_the_result_is_refused_by_name(
    client: openai.OpenAI, field: str, value: object
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "x"}], extra_body={field: value}
        )
    assert refused.value.param == field


def test_arguments_of_the_request_reach_the_chat_template(
    client: openai.OpenAI, served: PolicyProcess, tokenizer: ModelTokenizer
) -> None:
    messages: Any = [{"role": "user", "content": "hi"}]
    arguments = {"chat_template_kwargs": {"enable_thinking": False}}
    reply: Any = client.chat.completions.create(
        model="tiny",
        messages=messages,
        max_tokens=1,
        reasoning_effort="low",
        extra_body={**arguments, "return_token_ids": True},
    )
    assert tokenizer.decode(reply.prompt_token_ids) == "<user>hi\n<effort low><assistant><think></think>"
    tokens = httpx.post(f"{served.url}/tokenize", json={"messages": messages, **arguments}, timeout=60).json()["tokens"]
    assert tokenizer.decode(tokens) == "<user>hi\n<assistant><think></think>"


def test_tokens_are_named_by_their_ids_on_request(client: openai.OpenAI) -> None:
    extra = {"return_tokens_as_token_ids": True, "return_token_ids": True}
    text: Any = client.completions.create(model="tiny", prompt="abc", max_tokens=4, logprobs=1, extra_body=extra)
    [choice] = text.choices
    names = [f"token_id:{token}" for token in choice.token_ids]
    assert choice.logprobs.tokens == names
    assert all(name in tops for name, tops in zip(names, choice.logprobs.top_logprobs, strict=True))
    for is_streamed in (False, True):
        reply: Any = client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "hi"}],
            max_tokens=4,
            temperature=0,
            logprobs=True,
            top_logprobs=1,
            stream=is_streamed,
            extra_body=extra,
        )
        choices = [chunk.choices[0] for chunk in reply] if is_streamed else reply.choices
        ids = [token for choice in choices for token in choice.token_ids or ()]
        entries = [entry for choice in choices if choice.logprobs for entry in choice.logprobs.content]
        assert [entry.token for entry in entries] == [f"token_id:{token}" for token in ids]
        assert [entry.top_logprobs[0].token for entry in entries] == [entry.token for entry in entries]


def test_special_tokens_are_in_the_text_on_request(client: openai.OpenAI, tokenizer: ModelTokenizer) -> None:
    special = set(tokenizer.special_token_ids)
    extra = {"skip_special_tokens": False, "ignore_eos": True, "return_token_ids": True}
    for is_streamed in (False, True):
        reply: Any = client.completions.create(
            model="tiny", prompt="abc", max_tokens=100, n=8, seed=1, stream=is_streamed, extra_body=extra
        )
        texts, ids = [""] * 8, [list[int]() for _ in range(8)]
        for part in reply if is_streamed else [reply]:
            for choice in part.choices:
                texts[choice.index] += choice.text
                ids[choice.index] += choice.token_ids
        assert special & {token for tokens in ids for token in tokens}, "no special token was sampled"
        assert texts == [tokenizer.decode(tokens, skip_special_tokens=False) for tokens in ids]


def test_texts_and_chats_are_tokenized_in_the_format_of_vllm(served: PolicyProcess, tokenizer: ModelTokenizer) -> None:
    def post(path: str, body: Any) -> Any:
        return httpx.post(f"{served.url}{path}", json=body, timeout=60).json()

    plain = post("/tokenize", {"prompt": "hi", "add_special_tokens": False})
    assert plain == {"count": 2, "max_model_len": MAX_LEN, "tokens": tokenizer.encode("hi")}
    chat = post("/tokenize", {"messages": [{"role": "user", "content": "hi"}]})
    assert post("/detokenize", {"tokens": chat["tokens"]}) == {"prompt": "<user>hi\n<assistant>"}
    assert post("/tokenize", {})["error"]["param"] == "prompt"
    for outside in (-1, 2**40):
        assert post("/detokenize", {"tokens": [outside]})["error"]["param"] == "tokens"
    assert httpx.get(f"{served.url}/tokenizer_info", timeout=60).json()["eos_token"] in SPECIAL_TOKENS


@pytest.mark.skipif(not AGENTS_PYTHON.exists(), reason="make test-agents installs the harness")
def test_lm_evaluation_harness_scores_multiple_choice(
    served: PolicyProcess, client: openai.OpenAI, tmp_path: Path
) -> None:
    rows: list[Any] = [
        {"question": f"{a} + {b} =", "choices": [f" {a + b}", f" {a}", " unknown"], "answer": 0}
        for a, b in ((1, 2), (4, 3), (2, 6), (5, 5))
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "sums.yaml").write_text(
        f"""
task: sums
dataset_path: json
dataset_kwargs: {{data_files: {{test: {tmp_path}/rows.jsonl}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
target_delimiter: ""
metric_list: [{{metric: acc}}]
"""
    )
    arguments = ["--model", "local-completions", "--tasks", "sums", "--include_path", str(tmp_path)]
    model = f"base_url={served.url}/v1/completions,model=tiny,tokenizer_backend=remote,num_concurrent=1"
    subprocess.run(
        [
            str(AGENTS_PYTHON),
            "-m",
            "lm_eval",
            *arguments,
            "--model_args",
            model,
            "--output_path",
            str(tmp_path / "out"),
        ],
        env={**os.environ, "OPENAI_API_KEY": "x", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf")},
        check=True,
        capture_output=True,
        timeout=250,
    )
    (results,) = (tmp_path / "out").rglob("results_*.json")

    def score(question: str, choice: str) -> float:
        block: Any = (
            client.completions.create(model="tiny", prompt=question + choice, echo=True, max_tokens=0, logprobs=0)
            .choices[0]
            .logprobs
        )
        return float(sum(block.token_logprobs[-len(choice) :]))

    expected = [max(range(3), key=lambda at: score(row["question"], row["choices"][at])) == 0 for row in rows]
    assert json.loads(results.read_text())["results"]["sums"]["acc,none"] == pytest.approx(sum(expected) / 4)


def test_the_model_is_listed(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


async def test_a_client_that_disconnects_from_a_stream_frees_its_slot(served: PolicyProcess) -> None:
    async with aiohttp.ClientSession() as session:

        async def metric(name: str) -> float:
            async with session.get(served.url + "/metrics") as response:
                lines = (await response.text()).splitlines()
            return next(float(line.split()[-1]) for line in lines if line.startswith(f"rollbook_policy_{name} "))

        before = await metric("tokens_total")
        body = {"model": "tiny", "prompt": "x", "max_tokens": 500, "stream": True, "ignore_eos": True}
        async with session.post(served.url + "/v1/completions", json=body) as response:
            assert (await response.content.readline()).startswith(b"data: ")
            response.close()
        async with asyncio.timeout(60):
            while await metric("requests_running"):
                pass
        assert await metric("tokens_total") - before < 500


def test_a_configured_key_is_required(tmp_path: Path) -> None:
    arguments = ("--engine", "scripted", "--api-key-env", "POLICY_KEY")
    with policy_process(tmp_path, *arguments, env={"POLICY_KEY": "secret"}) as served:
        with openai.OpenAI(base_url=served.url + "/v1", api_key="secret", max_retries=0, timeout=60.0) as client:
            assert client.completions.create(model="policy", prompt=[1], max_tokens=1).choices
            with pytest.raises(openai.BadRequestError, match="no tokenizer"):
                client.completions.create(model="policy", prompt="text")
        with (
            openai.OpenAI(base_url=served.url + "/v1", api_key="guess", max_retries=0, timeout=60.0) as other,
            pytest.raises(openai.AuthenticationError),
        ):
            other.models.list()
        assert served.stop().count("serving") == 1
        assert served.process.returncode == 0
