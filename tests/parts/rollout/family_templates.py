"""Chat templates in the style of published ones, as short as they can be: how a family marks turns, what it does with earlier
reasoning, and how it writes tool calls. And the table of docs/token-fidelity.md, which says what each keeps.

    python -m tests.parts.rollout.family_templates
"""

import sys
from dataclasses import dataclass

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from rollbook.rollout.agents.template_check import TemplateVerdict, check_template
from rollbook.rollout.chat.tokenizer import ModelTokenizer

HERMES_CALLS = (
    "{% for c in m.tool_calls or [] %}{{ '\\n' if m.content or not loop.first }}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}'
)
TOOLS = "{% for t in tools or [] %}{{ t | tojson }}\n{% endfor %}"
LAST_USER = (
    "{% set last = namespace(user=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set last.user = loop.index0 %}"
    "{% endif %}{% endfor %}"
)
PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
WITHOUT_THOUGHT = "{{ (m.content or '').split('</think>')[-1].lstrip('\\n') }}"


FIELD_THOUGHT = "<think>\n{{ m.reasoning_content or '' }}\n</think>\n\n"
QWEN_CALLS = (
    "{% for c in m.tool_calls or [] %}{{ '\\n' if m.content or not loop.first }}<tool_call>\n<function={{ c.function.name }}>\n"
    "{% for name, value in c.function.arguments.items() %}<parameter={{ name }}>\n"
    "{{ value | tojson if value is mapping or (value is sequence and value is not string) else value | string }}\n</parameter>\n"
    "{% endfor %}</function>\n</tool_call>{% endfor %}"
)


def chatml(assistant: str, *, start: str = "", calls: str = HERMES_CALLS, prompt: str = "") -> str:
    """Turns of ChatML with tools as Qwen writes them. `assistant`: an earlier reply. `prompt`: the end of the prompt."""
    return (
        f"{start}{{% if tools %}}<|im_start|>system\n{TOOLS}<|im_end|>\n{{% endif %}}{{% for m in messages %}}"
        "{% if m.role == 'assistant' %}<|im_start|>assistant\n" + assistant + calls + "<|im_end|>\n"
        "{% elif m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m.content }}\n</tool_response><|im_end|>\n"
        "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
        + PROMPT.replace("{% endif %}", f"{prompt}{{% endif %}}")
    )


@dataclass(frozen=True, slots=True)
class Style:
    families: str
    template: str
    why: str
    """What decides whether an earlier turn is rewritten."""
    eos: str = "<|im_end|>"
    tool_style: str = "hermes"

    @property
    def opens_thought(self) -> bool:
        """The prompt ends with the start of a thought."""
        chat = [{"role": "user", "content": "x"}]
        return self.tokenizer().render(chat, add_generation_prompt=True).rstrip().endswith("<think>")

    def tokenizer(self) -> ModelTokenizer:
        """Bytes, and one control token: the end of a turn."""
        vocabulary = {token: n for n, token in enumerate([self.eos, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
        fast = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
        fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        fast.decoder = decoders.ByteLevel()
        fast.add_special_tokens([self.eos])
        return ModelTokenizer(
            fast,
            chat_template=self.template,
            special_tokens={"bos_token": "<s>", "eos_token": self.eos},
            eos_token_ids=[vocabulary[self.eos]],
        )


STYLES = (
    Style("Qwen2.5, Qwen3-Instruct, Hermes", chatml("{{ m.content }}"), "earlier replies are printed as they are"),
    Style(
        "Qwen3 (hybrid thinking)",
        chatml(
            "{% if loop.index0 > last.user %}{{ m.content }}{% else %}" + WITHOUT_THOUGHT + "{% endif %}",
            start=LAST_USER,
        ),
        "reasoning before the last user turn is dropped; within a tool loop it stays",
    ),
    Style(
        "Qwen3.5, Nemotron 3 (thinking)",
        chatml(
            "{% if loop.index0 > last.user %}" + FIELD_THOUGHT + "{% endif %}{{ m.content }}",
            start=LAST_USER,
            calls=QWEN_CALLS,
            prompt="<think>\n",
        ),
        "the prompt starts the reasoning; before the last user turn it is dropped, within a tool loop it stays",
        tool_style="qwen",
    ),
    Style(
        "Qwen3.8 (thinking)",
        chatml(FIELD_THOUGHT + "{{ m.content }}", calls=QWEN_CALLS, prompt="<think>\n"),
        "the prompt starts the reasoning, and all of it stays",
        tool_style="qwen",
    ),
    Style(
        "Qwen3-Coder",
        chatml("{{ m.content }}", calls=QWEN_CALLS),
        "earlier replies are printed as they are, calls with one tag for each argument",
        tool_style="qwen",
    ),
    Style(
        "LFM2 (thinking)",
        chatml("{% if loop.last %}{{ m.content }}{% else %}" + WITHOUT_THOUGHT + "{% endif %}"),
        "reasoning of every turn but the last is dropped, even in a tool loop",
    ),
    Style(
        "DeepSeek R1 and V3.1 (thinking)",
        "{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}{% elif m.role == 'user' %}<|User|>{{ m.content }}"
        "{% elif m.role == 'assistant' %}<|Assistant|>" + WITHOUT_THOUGHT + "<|end_of_sentence|>{% else %}"
        "{{ raise_exception('tool messages are not supported') }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|Assistant|>{% endif %}",
        "reasoning of all earlier turns is dropped",
        eos="<|end_of_sentence|>",
    ),
    Style(
        "GLM 4.5 to 5",
        LAST_USER + "[gMASK]<sop>{% if tools %}<|system|>\n" + TOOLS + "{% endif %}{% for m in messages %}"
        "{% if m.role == 'assistant' %}<|assistant|>\n{% if '</think>' in m.content and loop.index0 > last.user %}{{ m.content }}"
        "{% elif '</think>' in m.content %}<think></think>\n"
        + WITHOUT_THOUGHT
        + "{% else %}{{ m.content }}{% endif %}"
        + HERMES_CALLS
        + "{% elif m.role == 'tool' %}<|observation|>\n<tool_response>\n{{ m.content }}\n</tool_response>\n"
        "{% else %}<|{{ m.role }}|>\n{{ m.content }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>\n{% endif %}",
        "earlier reasoning becomes an empty <think></think>; within a tool loop it stays. Its own calls have arguments"
        " as tags (`tool_parser`); here they are Hermes'",
        eos="<|user|>",
    ),
    Style(
        "Llama 3.1 to 3.3",
        "<|begin_of_text|>{% if tools %}<|start_header_id|>system<|end_header_id|>\n\n"
        + TOOLS
        + "<|eot_id|>{% endif %}"
        "{% for m in messages %}<|start_header_id|>{{ 'ipython' if m.role == 'tool' else m.role }}<|end_header_id|>\n\n"
        "{% for c in m.tool_calls or [] %}"
        '{"name": "{{ c.function.name }}", "parameters": {{ c.function.arguments | tojson }}}{% else %}{{ m.content | trim }}'
        "{% endfor %}<|eot_id|>{% endfor %}"
        "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}",
        "replies are trimmed, which keeps the sampled tokens; a call is the whole message, as bare JSON",
        eos="<|eot_id|>",
        tool_style="llama",
    ),
    Style(
        "Gemma 3",
        "{% set first = messages[0].content ~ '\n\n' if messages[0].role == 'system' else '' %}{% for m in messages %}"
        "{% if m.role == 'tool' %}{{ raise_exception('roles must alternate user and assistant') }}{% elif m.role != 'system' %}"
        "<start_of_turn>{{ 'model' if m.role == 'assistant' else 'user' }}\n{{ first if loop.index0 < 2 and m.role == 'user' }}"
        "{{ m.content | trim }}<end_of_turn>\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}",
        "the system message is part of the first user turn; no tools",
        eos="<end_of_turn>",
    ),
    Style(
        "Mistral 7B v0.3 to Nemo",
        "{% set s = messages[0].content ~ '\n\n' if messages[0].role == 'system' else '' %}"
        + LAST_USER
        + "<s>{% for m in messages %}"
        "{% if m.role == 'user' %}[INST] {{ s if loop.index0 == last.user }}{{ m.content }}[/INST]"
        "{% elif m.role == 'assistant' %}{{ m.content }}</s>{% elif m.role == 'tool' %}"
        "{{ raise_exception('tool calls need their own format') }}{% endif %}{% endfor %}",
        "the system message moves to the last user turn, so every turn of a conversation with one is rewritten",
        eos="</s>",
    ),
    Style(
        "Mistral Small 3, Magistral",
        "<s>{% for m in messages %}{% if m.role == 'system' %}[SYSTEM_PROMPT]{{ m.content }}[/SYSTEM_PROMPT]"
        "{% elif m.role == 'user' %}[INST]{{ m.content }}[/INST]{% elif m.role == 'assistant' %}{{ m.content }}</s>"
        "{% else %}{{ raise_exception('tool calls need their own format') }}{% endif %}{% endfor %}",
        "earlier replies are printed as they are; tool calls have a format of their own (`tool_parser`)",
        eos="</s>",
    ),
    Style(
        "gpt-oss (harmony)",
        LAST_USER
        + "{% for m in messages %}{% if m.role == 'assistant' %}<|start|>assistant<|channel|>final<|message|>"
        + WITHOUT_THOUGHT
        + "<|end|>{% elif m.role == 'tool' %}{{ raise_exception('tool calls need their own format') }}{% else %}"
        "<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|start|>assistant{% endif %}",
        "a reply is sampled with its channel, and printed without the reasoning channel and with another end token",
        eos="<|return|>",
    ),
    Style(
        "Phi 4, Granite 3 and 4",
        "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('tool calls need their own format') }}{% endif %}"
        "<|im_start|>{{ m.role }}<|im_sep|>{{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant<|im_sep|>{% endif %}",
        "earlier replies are printed as they are; tool calls have a format of their own (`tool_parser`)",
    ),
)
COLUMNS = {
    "turns": "two turns",
    "system message": "system message",
    "tool call": "tool call and result",
    "thinking, then a user turn": "thinking, then a user turn",
    "thinking in a tool loop": "thinking in a tool loop",
}
WORDS = {
    TemplateVerdict.EXACT: "extends",
    TemplateVerdict.REWRITTEN: "**forks**",
    TemplateVerdict.UNSUPPORTED: "–",
}


def table() -> str:
    lines = [f"| style of | {' | '.join(COLUMNS)} | why |", "|---" * (len(COLUMNS) + 2) + "|"]
    for style in STYLES:
        verdicts = verdicts_of(style)
        cells = [WORDS[verdicts[case]] if case in verdicts else "–" for case in COLUMNS.values()]
        lines.append(f"| {style.families} | {' | '.join(cells)} | {style.why} |")
    return "\n".join(lines) + "\n"


def verdicts_of(style: Style) -> dict[str, TemplateVerdict]:
    found = check_template(style.tokenizer(), style=style.tool_style)
    return {finding.case: finding.verdict for finding in found}


if __name__ == "__main__":
    sys.stdout.write(table())
