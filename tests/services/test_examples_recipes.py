"""The examples under examples/ run as documented, on small new models."""

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.learning import defaults, proof
from rollbook.run.config.run import RunConfig, load_config
from tests.parts.run.examples import modules_of
from tests.parts.run.small import REPOSITORY, rollbook

MATHS = REPOSITORY / "examples" / "03_maths_with_retry"


@pytest.fixture(scope="module")
def maths() -> Iterator[dict[str, ModuleType]]:
    with modules_of(MATHS, ("maths_with_retry", "scoring", "sums", "prepare_data")) as found:
        yield found


def is_scored_right(maths: dict[str, ModuleType], reply: str, expected: str, **options: Any) -> bool:
    is_right: bool = asyncio.run(maths["scoring"].Scorer(**options).is_right(reply, expected))
    return is_right


@pytest.mark.parametrize(
    ("reply", "expected", "is_right"),
    [
        (r"so \boxed{7}", "7", True),
        (r"\boxed{8}, no: \boxed{7}", "7", True),
        (r"\boxed{0.50}", "1/2", True),
        (r"\boxed{1,000}", "it makes 1000 #### 1,000", True),
        ("7", "7", False),
        (r"\boxed{}", "7", False),
        (r"\boxed{7", "7", False),
    ],
)
def test_answers_are_scored_by_their_last_box(
    maths: dict[str, ModuleType], reply: str, expected: str, is_right: bool
) -> None:
    assert is_scored_right(maths, reply, expected) is is_right


def test_a_lenient_scorer_uses_the_last_number_without_a_box(maths: dict[str, ModuleType]) -> None:
    assert is_scored_right(maths, "3 + 4 is 7.", "7", is_lenient=True)


@settings(max_examples=150)
@given(
    reply=st.text(max_size=80) | st.text(max_size=40).map(lambda t: f"\\boxed{{{t}}}"), expected=st.text(max_size=20)
)
def test_no_reply_makes_the_scorer_raise(maths: dict[str, ModuleType], reply: str, expected: str) -> None:
    # Without math-verify, which is slow to start. The next test covers it.
    setattr(maths["scoring"], "HAS_MATH_VERIFY", False)  # noqa: B010 - the module is known at run time only
    assert is_scored_right(maths, reply, expected) in (True, False)


def test_algebra_is_scored_in_a_process_that_is_replaced_when_it_hangs(
    maths: dict[str, ModuleType],
) -> None:
    scoring = maths["scoring"]
    setattr(scoring, "HAS_MATH_VERIFY", True)  # noqa: B010 - the module is known at run time only

    async def several() -> list[bool]:
        scorer = scoring.Scorer(timeout_s=20.0)
        try:
            first = await scorer.is_right(r"\boxed{\frac{\sqrt{2}}{2}}", r"\frac{1}{\sqrt{2}}")
            # After the process was killed, the next request starts another one.
            scorer._verifier.kill()
            second = await scorer.is_right(r"\boxed{x+1}", "y")
            third = await scorer.is_right(r"\boxed{x+1}", "1+x")
            return [first, second, third]
        finally:
            if scorer._verifier is not None:
                scorer._verifier.kill()

    assert asyncio.run(several()) == [True, False, True]


def test_rows_are_prepared_from_a_file_and_a_bad_row_is_reported(maths: dict[str, ModuleType], tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text(json.dumps({"question": "1 + 1?", "answer": "two #### 2"}) + "\n", encoding="utf-8")
    maths["prepare_data"].main(["gsm8k", "--from", str(source), "--split", "test", "--to", str(tmp_path)])
    row = json.loads((tmp_path / "gsm8k-test.jsonl").read_text(encoding="utf-8"))
    assert row == {"id": "gsm8k-test-1", "split": "test", "question": "1 + 1?", "answer": "two #### 2"}
    source.write_text(json.dumps({"question": "1 + 1?", "answer": "two"}) + "\n", encoding="utf-8")
    with pytest.raises(SystemExit, match="row 1 is not a GSM8K row"):
        maths["prepare_data"].main(["gsm8k", "--from", str(source), "--to", str(tmp_path)])


def test_gsm8k_is_prepared_from_a_dataset_directory_and_count_limits_its_rows(
    maths: dict[str, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "gsm8k").mkdir()
    lines = [json.dumps({"question": f"{n} + 1?", "answer": f"so #### {n + 1}"}) + "\n" for n in range(5)]
    (tmp_path / "gsm8k" / "test.jsonl").write_text("".join(lines), encoding="utf-8")
    arguments = ["gsm8k", "--hub", str(tmp_path / "gsm8k"), "--split", "test", "--to", str(tmp_path)]
    for more, expected in ((["--count", "2"], 2), ([], 5)):
        maths["prepare_data"].main([*arguments, *more])
        rows = [json.loads(line) for line in (tmp_path / "gsm8k-test.jsonl").read_text(encoding="utf-8").splitlines()]
        assert [row["id"] for row in rows] == [f"gsm8k-test-{n + 1}" for n in range(expected)]
    with pytest.raises(SystemExit):
        maths["prepare_data"].main([*arguments, "--count", "0"])


def test_without_arguments_the_sums_are_written_and_gsm8k_only_if_it_can_be_read(
    maths: dict[str, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_hub(*_: object, **__: object) -> Iterator[Any]:
        raise SystemExit("Couldn't reach 'openai/gsm8k' on the hub")

    monkeypatch.setattr(maths["prepare_data"], "hub_rows", no_hub)
    assert maths["prepare_data"].main(["--output-dir", str(tmp_path)]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["demonstrations.jsonl"]
    assert "GSM8K (train) is left out" in capsys.readouterr().err
    (tmp_path / "gsm8k").mkdir()
    for split in ("train", "test"):
        line = json.dumps({"question": f"{split}?", "answer": "so #### 2"}) + "\n"
        (tmp_path / "gsm8k" / f"{split}.jsonl").write_text(line * 3, encoding="utf-8")
    assert maths["prepare_data"].main(["--output-dir", str(tmp_path), "--max-rows", "2"]) == 0
    for split in ("train", "test"):
        lines = (tmp_path / f"gsm8k-{split}.jsonl").read_text(encoding="utf-8").splitlines()
        assert [json.loads(line)["id"] for line in lines] == [f"gsm8k-{split}-1", f"gsm8k-{split}-2"]


def test_the_gsm8k_recipe_has_the_published_sizes_and_a_retry_prompt() -> None:
    config = load_config(MATHS / "gsm8k.toml").config
    assert config.tasks.source == "hf:openai/gsm8k"
    assert (config.gate.groups_per_step, config.rollout.completions_per_prompt, config.rollout.max_turns) == (8, 8, 2)
    assert (config.gate.max_head_offpolicy_versions, config.trainer.ppo_n_minibatches) == (1, 1)
    assert config.rollout.drop_constant_reward
    retry = config.rollout.settings["retry_message"]
    assert all(part in retry for part in ("wrong", "could not be read", "answer again", "\\boxed"))


def test_every_published_option_has_a_counterpart_that_exists() -> None:
    """The settings in the table of docs/async-recipe.md are fields; where a value of gsm8k.toml is named, it has that value."""
    config = load_config(MATHS / "gsm8k.toml").config
    page = (REPOSITORY / "docs" / "async-recipe.md").read_text(encoding="utf-8")
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith("| `--")]
    options = {option for row in rows for option in re.findall(r"`(--[a-z-]+)`", row[0])}
    assert options >= {"--max-turns", "--ppo-n-minibatches", "--max-concurrency-rollout-sample", "--replica-count"}
    assert len(options) == 25
    sections = "|".join(RunConfig.model_fields)
    for row in rows:
        for setting in re.findall(rf"`((?:{sections})\.[a-z_.]+)", row[2]):
            value: Any = config
            for name in setting.split("."):
                assert name in type(value).model_fields, setting
                value = getattr(value, name)
                if value is None:
                    break
            if re.fullmatch(r"[0-9.e-]+", named := row[3].strip(" |`")):
                assert value == float(named), setting


def test_there_are_two_hundred_sums_and_the_vocabulary_covers_them(maths: dict[str, ModuleType]) -> None:
    sums = maths["sums"]
    rows = list(sums.tasks())
    assert len({row["question"] for row in rows}) == 200
    assert len(list(sums.tasks("test"))) == 20
    words = {word for row in rows for word in row["question"].split()} | set(maths["maths_with_retry"].RETRY.split())
    config = (MATHS / "sft.toml").read_text(encoding="utf-8")
    assert all(f'"{word}"' in config for word in words)
    assert all(f"'\\boxed{{{n}}}'" in config for n in sums.ANSWERS)


@pytest.mark.slow
def test_the_single_turn_example_trains_from_tokens(tmp_path: Path) -> None:
    config = REPOSITORY / "examples" / "08_single_turn_tokens" / "run.toml"
    arguments = ["--run-dir", str(tmp_path / "run"), "--set", "trainer.max_steps=60", "--json"]
    done = rollbook("train", str(config), *arguments)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])
    assert (summary["steps"], summary["audit"]) == (60, "ok")
    assert summary["max_lag"] <= 2
    assert summary["solved_last"] > summary["solved_first"] + 0.2


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_proof_of_learning_holds_in_its_short_form() -> None:
    assert proof.main(["--device", "cpu", "--short"]) == 0


@pytest.mark.slow
def test_a_model_tasks_and_a_reward_learn_with_the_default_settings(tmp_path: Path) -> None:
    folder = tmp_path / "arithmetic"
    defaults.prepare(folder, list(defaults.arithmetic()))
    defaults.write_study(folder, steps=60)
    done = rollbook("train", str(folder / "run.toml"), "--run-dir", str(tmp_path / "run"), "--no-dashboard", "--json")
    summary = json.loads(done.stdout.splitlines()[-1])
    assert (summary["end"], summary["audit"]) == ("finished", "ok")
    # After 100 steps it was 1.5 to 1.7 times as high (two seeds).
    assert summary["reward_last"] > 1.2 * summary["reward_first"]
    assert rollbook("replay", str(tmp_path / "run"), "--verify").returncode == 0
