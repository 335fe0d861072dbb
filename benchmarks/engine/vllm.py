"""Run by vLLM's Python: reads model and requests from stdin, prints tokens per second of each round. Does not import rollbook."""

import json
import sys
import time

from vllm import LLM, SamplingParams  # installed in a separate virtual environment


def main() -> None:
    settings = json.load(sys.stdin)
    llm = LLM(
        model=settings["model"],
        dtype="float32",
        enforce_eager=True,
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
    rates = []
    llm.generate(prompts[: settings["slots"]], samplings[: settings["slots"]], use_tqdm=False)
    for _ in range(settings["rounds"]):
        started = time.perf_counter()
        outputs = llm.generate(prompts, samplings, use_tqdm=False)
        tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
        rates.append(tokens / (time.perf_counter() - started))
    print(json.dumps(rates))


if __name__ == "__main__":
    main()
