"""Creates demonstrations, a tokenizer trained on them, and a small model with random weights: the inputs of `sft.toml`.

    python examples/04_aws_agent_learns/prepare.py --to runs/aws-agent

A script plays the reference solutions, some with deliberate mistakes, in real simulators, so the demonstrations contain real
output.
"""

import argparse
import asyncio
import json
import random
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import small_aws
import torch
from tokenizers import AddedToken, Regex, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Split
from tokenizers.pre_tokenizers import Sequence as Pieces
from tokenizers.trainers import BpeTrainer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from rollbook.concurrency.deadline import Deadline
from rollbook.envs.builtin.awscli.environment import AwsCliEnvironment
from rollbook.envs.builtin.awscli.short_text import goal_of
from rollbook.envs.builtin.awscli.solution import ReferencePolicy
from rollbook.telemetry.events import EventLog

Chat = list[dict[str, str]]
Flaw = Callable[[str], str]
FLAWED_SHARE = 0.6
"""The share of episodes with deliberate mistakes. Training on rewards removes the mistakes that imitation learns."""
GUESSED_VERBS = {
    "create": "make",
    "put": "set",
    "get": "read",
    "list": "show",
    "describe": "show",
    "delete": "remove",
    "add": "join",
    "update": "change",
    "head": "stat",
}
SPECIAL = ["<pad>", "<bos>", "<eos>", "<unk>", "<user>", "<agent>"]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}<agent>{{ m.content }}<eos>{% else %}"
    "<user>{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}<agent>{% endif %}"
)
NAME_WORDS = re.compile("|".join(sorted(small_aws.WORDS, key=len, reverse=True)))


def guessed_operation(line: str) -> str:
    """`create-bucket` becomes `make-bucket`."""
    aws, service, operation, *rest = line.split(" ")
    verb, dash, thing = operation.partition("-")
    return " ".join([aws, service, GUESSED_VERBS.get(verb, "do") + dash + thing, *rest])


def guessed_option(line: str) -> str:
    """The first option becomes `--id`; without options, `--all` is added."""
    return re.sub(r" --[a-z-]+", " --id", line, count=1) if " --" in line else f"{line} --all"


def cut_name(line: str) -> str:
    """The first name is shortened; without a name, the last word of the line is dropped."""
    cut = re.sub(rf"({NAME_WORDS.pattern})[-/_]({NAME_WORDS.pattern})", r"\1", line, count=1)
    return line.rpartition(" ")[0] if cut == line else cut


FLAWS: list[Flaw] = [guessed_operation, guessed_option, cut_name]


async def play(rows: Sequence[dict[str, Any]], clouds: int) -> list[Chat]:
    """Play all rows in simulators, some with flaws. Returns the conversations."""
    chats: list[Chat] = []
    rng = random.Random(len(rows))
    waiting = [(row, rng.sample(FLAWS, 2) if rng.random() < FLAWED_SHARE else []) for row in rows]
    async with AwsCliEnvironment.open_pool(size=clouds, log=EventLog("prepare"), args={"base_port": 0}) as pool:

        async def work() -> None:
            while waiting:
                row, flaws = waiting.pop()
                env = await pool.acquire(Deadline(120, "a cloud"))
                try:
                    chat = await _play_episode(env, row, flaws)
                finally:
                    await env.close()
                if chat is not None:
                    chats.append(chat)
                if len(chats) % 50 == 0:
                    print(f"{len(chats)} demonstrations, {len(waiting)} tasks left", file=sys.stderr, flush=True)

        async with asyncio.TaskGroup() as group:
            for _ in range(clouds):
                group.create_task(work())
    return chats


async def _play_episode(env: Any, row: dict[str, Any], flaws: Sequence[Flaw]) -> Chat | None:
    """One episode: the reference solution, or moves with one flaw each. None if it did not end as intended."""
    policy = ReferencePolicy(row)
    seen = await env.reset(row)
    right = policy.next_line(seen)
    chat = [{"role": "user", "content": goal_of(seen.text)}]
    for flaw in flaws:
        chat.append({"role": "assistant", "content": flaw(str(right))})
        seen = await env.step(chat[-1]["content"])
        if seen.done:
            return None if seen.solved else chat
        chat.append({"role": "user", "content": small_aws.seen_by_agent(seen.text)})
    if flaws:
        return chat[:-1]
    while right is not None:
        chat.append({"role": "assistant", "content": right})
        seen = await env.step(right)
        if seen.done:
            return chat if seen.solved else None
        chat.append({"role": "user", "content": small_aws.seen_by_agent(seen.text)})
        right = policy.next_line(seen)
    return None


def renamed(chats: Sequence[Chat], times: int, *, seed: int) -> Iterator[Chat]:
    """Each demonstration `times` times, with the words of its names replaced consistently. With fixed names the model would
    memorise them instead of learning to copy. Held-out pairs of words never occur."""
    rng = random.Random(seed)
    for _ in range(times):
        for chat in rng.sample(chats, len(chats)):
            texts = _with_other_names(chat, rng)
            while any(small_aws.has_held_out_pair(text) for text in texts):
                texts = _with_other_names(chat, rng)
            yield [{**message, "content": text} for message, text in zip(chat, texts, strict=True)]


def _with_other_names(chat: Chat, rng: random.Random) -> list[str]:
    others = dict(zip(small_aws.WORDS, rng.sample(small_aws.WORDS, len(small_aws.WORDS)), strict=True))
    return [NAME_WORDS.sub(lambda word: others[word[0]], message["content"]) for message in chat]


def train_tokenizer(chats: Sequence[Chat], *, vocab_size: int) -> Any:
    """Each word of a name is one token in every position, so a name is copied token by token. The words of commands include the
    space before them, so a command has about ten tokens."""
    core = Tokenizer(BPE(unk_token="<unk>"))
    words = Regex(r" ?arn:aws:[a-z0-9]*:[a-z0-9-]*:[0-9]*:| ?[A-Za-z-]+|[0-9]+|[^A-Za-z0-9]")
    core.pre_tokenizer = Pieces([Split(words, "isolated"), ByteLevel(add_prefix_space=False, use_regex=False)])
    core.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=vocab_size, special_tokens=SPECIAL, initial_alphabet=ByteLevel.alphabet(), show_progress=False
    )
    texts = [NAME_WORDS.sub("", message["content"]) for chat in chats for message in chat]
    core.train_from_iterator(texts, trainer)
    core.add_tokens([AddedToken(word, normalized=False) for word in small_aws.WORDS])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        additional_special_tokens=["<user>", "<agent>"],
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def make_model(tokenizer: Any, *, hidden: int, layers: int, seed: int) -> Any:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        num_key_value_heads=hidden // 32,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        initializer_range=0.04,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", type=Path, default=Path("runs/aws-agent"))
    parser.add_argument("--each", type=int, default=16, help="tasks of each kind, played in simulators")
    parser.add_argument("--renamed", type=int, default=50, help="repetitions of each demonstration, with other names")
    parser.add_argument("--clouds", type=int, default=3)
    parser.add_argument("--vocab", type=int, default=760)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    # Written last. New demonstrations would have other ids and dates and would not fit a warm start that uses the existing ones.
    if (args.to / "model" / "model.safetensors").exists():
        print(f"{args.to} is already prepared; remove it to start again", file=sys.stderr)
        return 0
    args.to.mkdir(parents=True, exist_ok=True)
    rows = list(small_aws.tasks("train", args.each, seed=args.seed))
    random.Random(args.seed).shuffle(rows)
    chats = asyncio.run(play(rows, args.clouds))
    with (args.to / "demonstrations.jsonl").open("w", encoding="utf-8") as file:
        for chat in renamed(chats, args.renamed, seed=args.seed):
            file.write(json.dumps({"messages": chat}) + "\n")
    tokenizer = train_tokenizer(chats, vocab_size=args.vocab)
    tokenizer.save_pretrained(str(args.to / "model"))
    model = make_model(tokenizer, hidden=args.hidden, layers=args.layers, seed=args.seed)
    model.save_pretrained(str(args.to / "model"))
    print(f"{len(chats)} demonstrations, {model.num_parameters():,} parameters", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
