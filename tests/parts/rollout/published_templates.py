"""Published chat templates, as TRL's package ships them, through the check of `rollbook tokens check`. And their table in
docs/token-fidelity.md.

    python -m tests.parts.rollout.published_templates
"""

import sys
from dataclasses import dataclass
from pathlib import Path

from tests.parts.rollout.family_templates import COLUMNS, WORDS, Style, verdicts_of

PACKAGE = Path(__file__).parents[3] / ".venvs" / "trl" / "lib"


@dataclass(frozen=True, slots=True)
class Published:
    model: str
    file: str
    eos: str = "<|im_end|>"
    tool_style: str = "none"


PUBLISHED = (
    Published("Qwen2.5", "qwen2_5", tool_style="hermes"),
    Published("Qwen3", "qwen3", tool_style="hermes"),
    Published("Qwen3-2507 Instruct", "qwen3_instruct_2507", tool_style="hermes"),
    Published("Qwen3.5, thinking", "qwen3_5_think", tool_style="qwen"),
    Published("Qwen3.5, not thinking", "qwen3_5_nothink", tool_style="qwen"),
    Published("Qwen3.6", "qwen3_6", tool_style="qwen"),
    Published("Qwen3.8", "qwen3_8", tool_style="qwen"),
    Published("Nemotron 3 Nano", "nemotron_3_nano", tool_style="qwen"),
    Published("Nemotron 3 Super", "nemotron_3_super", tool_style="qwen"),
    Published("Nemotron 3 Ultra", "nemotron_3_ultra", tool_style="qwen"),
    Published("Llama 3", "llama3", "<|eot_id|>"),
    Published("Llama 3.1", "llama3_1", "<|eot_id|>", "llama"),
    Published("Llama 3.2", "llama3_2", "<|eot_id|>", "llama"),
    Published("Gemma 3", "gemma3", "<end_of_turn>"),
    Published("Gemma 4", "gemma4_v5", "<turn|>"),
    Published("GLM 4.5", "glm4moe", "<|user|>"),
    Published("gpt-oss", "gptoss", "<|return|>"),
    Published("DeepSeek V3", "deepseekv3", "<｜end▁of▁sentence｜>"),  # the token's own characters
    Published("DeepSeek R1, distilled", "deepseek_r1_distill", "<｜end▁of▁sentence｜>"),  # likewise
    Published("Cohere Command", "cohere2", "<|END_OF_TURN_TOKEN|>"),
    Published("LFM2", "lfm2_v2"),
    Published("LFM2.5", "lfm2_2_5_v2"),
    Published("Phi 3.5", "phi3_5", "<|end|>"),
)


def folder() -> Path | None:
    """The templates of the package; None if it is not installed."""
    return next(PACKAGE.glob("python3*/site-packages/trl/chat_templates"), None)


def table(templates: Path) -> str:
    lines = [f"| published template | {' | '.join(COLUMNS)} |", "|---" * (len(COLUMNS) + 1) + "|"]
    for one in PUBLISHED:
        text = (templates / f"{one.file}.jinja").read_text(encoding="utf-8")
        verdicts = verdicts_of(Style(one.model, text, "", eos=one.eos, tool_style=one.tool_style))
        cells = [WORDS[verdicts[case]] if case in verdicts else "–" for case in COLUMNS.values()]
        lines.append(f"| {one.model} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    found = Path(sys.argv[1]) if sys.argv[1:] else folder()
    if found is None:
        sys.exit("TRL is not installed in its own environment: make test-trl")
    sys.stdout.write(table(found))
