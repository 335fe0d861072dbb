"""Run as a script by vLLM's Python. Does not import rollbook. Not named after vLLM, which it would hide.

Reads model and requests from the first line of stdin and replies with the seconds until vLLM is compiled and warmed up. For each
further line it runs all requests once and replies with tokens per second.
"""

import json
import sys
import time

from vllm import LLM, SamplingParams  # installed in a separate virtual environment

REPLY = "seconds or tokens/s: "


def main() -> None:
    started = time.perf_counter()
    settings = json.loads(sys.stdin.readline())
    llm = LLM(
        model=settings["model"],
        dtype="float32",
        skip_tokenizer_init=True,
        max_num_seqs=settings["slots"],
        max_num_batched_tokens=65536,
        max_model_len=1024,
        enable_prefix_caching=False,
    )
    prompts = [{"prompt_token_ids": prompt} for prompt, _ in settings["requests"]]
    samplings = [
        SamplingParams(max_tokens=max_tokens, temperature=1.0, ignore_eos=True, detokenize=False, logprobs=0)
        for _, max_tokens in settings["requests"]
    ]
    llm.generate(prompts, samplings, use_tqdm=False)
    print(f"{REPLY}{time.perf_counter() - started}", flush=True)
    for _ in sys.stdin:
        started = time.perf_counter()
        outputs = llm.generate(prompts, samplings, use_tqdm=False)
        tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
        print(f"{REPLY}{tokens / (time.perf_counter() - started)}", flush=True)


if __name__ == "__main__":
    main()
