"""Run by vLLM's own Python: model and requests come on stdin, tokens a second of each round go out. Imports nothing of ours."""

import json
import sys
import time

from vllm import LLM, SamplingParams  # only in its own virtual environment


def main() -> None:
    given = json.load(sys.stdin)
    llm = LLM(
        model=given["model"],
        dtype="float32",
        enforce_eager=True,
        skip_tokenizer_init=True,
        max_num_seqs=given["slots"],
        max_num_batched_tokens=65536,
        max_model_len=1024,
        enable_prefix_caching=False,
    )
    prompts = [{"prompt_token_ids": prompt} for prompt, _ in given["asked"]]
    samplings = [
        SamplingParams(max_tokens=most, temperature=1.0, ignore_eos=True, detokenize=False, logprobs=0)
        for _, most in given["asked"]
    ]
    rates = []
    llm.generate(prompts[: given["slots"]], samplings[: given["slots"]], use_tqdm=False)
    for _ in range(given["rounds"]):
        began = time.perf_counter()
        outputs = llm.generate(prompts, samplings, use_tqdm=False)
        tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
        rates.append(tokens / (time.perf_counter() - began))
    print(json.dumps(rates))


if __name__ == "__main__":
    main()
