"""Rewards and refusals of arithmetic, maths and the terminal."""

import threading
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rollbook.contracts.task import Observation
from rollbook.envs.builtin.arithmetic import SIGNS, Arithmetic, arithmetic_tasks
from rollbook.envs.builtin.maths import Maths, as_number, final_answer, is_same_answer
from rollbook.envs.builtin.question import Question
from rollbook.envs.builtin.terminal.commands import COMMANDS, run_line
from rollbook.envs.builtin.terminal.environment import MAX_OUTPUT_CHARS, TASKS, Terminal, command_of
from rollbook.envs.builtin.terminal.files import MAX_BYTES, CommandError, FileTree
from rollbook.envs.environment import EnvironmentAdapter

GSM8K = {"question": "How many clips?", "answer": "In May 48/2 = <<48/2=24>>24.\n#### 72"}


@pytest.mark.parametrize("task", arithmetic_tasks(20, seed=3, signs="+-*"), ids=lambda task: task["id"])
def test_only_the_right_number_earns_a_reward(task: dict[str, Any]) -> None:
    env, answer = Arithmetic(), SIGNS[task["sign"]](task["left"], task["right"])
    assert env.reset(task).text == f"{task['left']} {task['sign']} {task['right']} ="
    right = env.step(f"Let me think: it is {answer}.")
    assert (right.reward, right.done, right.solved) == (1.0, True, True)
    env.reset(task)
    assert env.step(str(answer + 1)).reward == 0.0


def test_arithmetic_accepts_one_answer_and_needs_a_number() -> None:
    env = Arithmetic()
    env.reset({"left": 1, "sign": "+", "right": 1})
    assert env.step("two").text == "there is no number in this answer"
    with pytest.raises(RuntimeError, match="reset first"):
        env.step("2")
    with pytest.raises(ValueError, match="lacks right"):
        env.reset({"left": 1, "sign": "+"})
    with pytest.raises(ValueError, match="unknown sign"):
        env.reset({"left": 1, "sign": "/", "right": 1})


def test_the_same_seed_gives_the_same_rows() -> None:
    assert arithmetic_tasks(5, seed=1) == arithmetic_tasks(5, seed=1) != arithmetic_tasks(5, seed=2)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{12} or rather \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{a{b}c} and an open \boxed{x", "a{b}c"),
        ("<answer>7</answer> no, <answer>8</answer>", "8"),
        ("work\n#### 1,234", "1,234"),
        ("The answer is $42.", "42"),
        ("the answer is: blue.", "blue"),
        ("3 and 4 make 7", "7"),
        ("nothing here", None),
    ],
)
def test_the_final_answer_of_a_text_is_found(text: str, answer: str | None) -> None:
    assert final_answer(text) == answer


def test_without_leniency_a_number_in_the_text_is_not_an_answer() -> None:
    assert final_answer("3 and 4 make 7", is_lenient=False) is None


@pytest.mark.parametrize(
    ("first", "second", "is_same"),
    [
        ("0.5", r"\frac{1}{2}", True),
        ("$1,200.00", "1200", True),
        ("50%", "50", True),
        ("1/3", "0.3333", False),
        ("7.", "7", True),
        ("Blue ", "blue", True),
        ("1/0", "1/0", True),
        ("1/0", "5", False),
        ("9" * 100, "9" * 100, True),
    ],
)
def test_answers_are_compared_by_value(first: str, second: str, is_same: bool) -> None:
    assert is_same_answer(first, second) is is_same


@given(st.text(max_size=300))
def test_any_text_can_be_parsed_for_an_answer(text: str) -> None:
    answer = final_answer(text)
    if answer is not None:
        assert is_same_answer(answer, answer)
    as_number(text)


def test_a_retry_earns_less_and_an_unsolved_problem_earns_nothing() -> None:
    env = Maths(max_turns=3, retry_discount=0.5)
    assert env.reset(GSM8K).text.startswith("How many clips?")
    assert env.step("71").text == "Not correct. 2 tries left."
    assert "contains no answer" in env.step("I do not know").text
    last = env.step("#### 72")
    assert (last.text, last.reward, last.done, last.solved) == ("Correct.", 0.25, True, True)
    env.reset(GSM8K)
    rewards = [env.step("1").reward for _ in range(3)]
    assert rewards == [0.0, 0.0, 0.0]
    with pytest.raises(RuntimeError, match="reset first"):
        env.step("72")


@pytest.mark.parametrize("settings", [{"max_turns": 0}, {"retry_discount": 0.0}, {"retry_discount": 1.5}])
def test_maths_refuses_invalid_settings(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        Maths(**settings)


def test_a_row_without_an_answer_is_refused() -> None:
    with pytest.raises(ValueError, match="lacks answer"):
        Maths().reset({"question": "?"})


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task["id"])
def test_every_terminal_task_is_solved_by_its_complete_solution_only(task: dict[str, Any]) -> None:
    env = Terminal()
    assert task["goal"] in env.reset(task).text
    seen = [env.step(line) for line in task["solution"]]
    assert [answer.reward for answer in seen] == [0.0] * (len(seen) - 1) + [1.0]
    assert (seen[-1].done, seen[-1].solved) == (True, True)
    env.reset(task)
    idle = [env.step("pwd") for _ in range(12)]
    assert (sum(answer.reward for answer in idle), idle[-1].done, idle[-1].solved) == (0.0, True, False)


def test_a_terminal_task_that_starts_solved_is_refused() -> None:
    with pytest.raises(ValueError, match="solved at the start"):
        Terminal().reset({"goal": "nothing", "expect": {"a": None}})


@pytest.mark.parametrize(
    "line",
    [
        "cat /etc/passwd",
        "cat ../../../../etc/passwd",
        "cat file:///etc/passwd",
        "ls /proc",
        "bash -c 'id'",
        "python3 -c 'print(1)'",
        "echo $(id)",
        "echo a; rm -rf /",
        "echo a && id",
        "echo a > /etc/passwd",
        "find / -exec id",
        "sort -o /tmp/x notes",
        "cat 'open",
    ],
)
def test_the_terminal_cannot_reach_the_machine(line: str) -> None:
    tree = FileTree()
    tree.write("notes", "mine\n")
    with pytest.raises(CommandError):
        run_line(tree, line)


def test_substitutions_are_plain_text() -> None:
    tree = FileTree()
    assert run_line(tree, "echo `id` $HOME ${PATH}") == "`id` $HOME ${PATH}\n"


def test_the_terminal_limits_its_output_its_files_and_its_input() -> None:
    env = Terminal()
    env.reset({"goal": "g", "files": {"big": "x" * 50_000}, "expect": {"a": "b"}})
    assert len(env.step("cat big").text) < MAX_OUTPUT_CHARS + 60
    tree = FileTree()
    tree.write("a", "x" * (MAX_BYTES // 2))
    with pytest.raises(CommandError, match="No space left"):
        run_line(tree, "cat a a > b")
    with pytest.raises(CommandError, match="at most"):
        run_line(tree, "echo " + "x" * 5_000)


BIG = "some words\n" * 40_000
LONG_LINES = {
    "reading one file many times": "cat " + "big " * 900,
    "searching one file many times": "grep -c x " + "big " * 900,
    "a long pipe": "cat big | " + "sort -n | " * 300 + "wc",
    "a pipe whose data grows": "cat big | " + "grep -n o | " * 100 + "wc",
    "listing one directory many times": "ls " + "many " * 700,
}


@pytest.mark.parametrize("case", LONG_LINES)
def test_the_work_of_a_command_line_is_limited_and_the_next_line_works(case: str) -> None:
    tree = FileTree()
    run_line(tree, "mkdir many")
    for i in range(1_000):
        run_line(tree, f"touch many/{i}")
    tree.write("big", BIG)
    with pytest.raises(CommandError, match=r"reads or writes too much|the limit is 1000000"):
        run_line(tree, LONG_LINES[case])
    assert run_line(tree, "echo still here") == "still here\n"


def test_a_path_has_a_limited_number_of_levels_and_characters() -> None:
    tree = FileTree()
    run_line(tree, "mkdir -p " + "/".join("d" * 60))
    for line in ("mkdir -p " + "/".join("d" * 1_900), "touch " + "x" * 300, "cd " + "x/" * 900, "mkdir " + "y" * 256):
        with pytest.raises(CommandError, match="File name too long"):
            run_line(tree, line)
    run_line(tree, "mkdir -p " + "/".join("e" * 40))
    with pytest.raises(CommandError, match="File name too long"):
        run_line(tree, "cp -r d " + "/".join("e" * 40))


def test_a_visit_of_deep_entries_counts_their_levels() -> None:
    """A copy bomb has many entries, each with many levels."""
    deep, flat = FileTree(), FileTree()
    run_line(deep, "mkdir -p d0/" + "/".join("d" * 58))
    for number in range(1, 30):
        run_line(deep, f"cp -r d0 d{number}")
    for number in range(30 * 59):
        flat.write(str(number), "")
    work = []
    for tree in (deep, flat):
        tree.start_line()
        assert len(tree.below(tree.path("/home"))) == 30 * 59 + 1
        work.append(tree._work)
    assert work[0] > 2 * work[1]


def test_a_pattern_over_many_long_names_is_counted() -> None:
    tree = FileTree()
    for number in range(900):
        tree.write(f"{'a' * 240}{number}", "")
    with pytest.raises(CommandError, match="too much"):
        run_line(tree, f"find . -name '*{'a' * 230}b'")
    assert run_line(tree, "find . -name '*899'").count("\n") == 1


def test_a_pipe_carries_a_limited_number_of_characters() -> None:
    tree = FileTree()
    tree.write("big", BIG)
    with pytest.raises(CommandError, match="the limit is 1000000"):
        run_line(tree, "cat big big big | wc -c")


def test_a_stopped_line_is_reported_to_the_agent_and_the_episode_continues() -> None:
    env = Terminal()
    env.reset({"goal": "g", "files": {"big": BIG}, "expect": {"a": "b\n"}})
    assert "stopped: the command line reads or writes too much" in env.step("wc " + "big " * 900).text
    assert env.step("echo b > a").solved


async def test_terminal_commands_run_outside_the_event_loop() -> None:
    used: list[int] = []

    class Watched(Terminal):
        def step(self, action: str) -> Observation:
            used.append(threading.get_ident())
            return super().step(action)

    env = EnvironmentAdapter(Watched(), name="terminal")
    await env.reset({"goal": "g", "expect": {"a": "b\n"}})
    await env.step("ls")
    await env.close()
    assert used[0] != threading.get_ident()


def test_files_are_copied_moved_and_removed_as_on_a_disk() -> None:
    tree = FileTree()
    for line in ("mkdir -p a/b", "echo one > a/b/f", "echo two >> a/b/f", "cp -r a c", "mv a/b/f g", "cd c/b"):
        assert run_line(tree, line) == ""
    assert run_line(tree, "cat f ../../g") == "one\ntwo\none\ntwo\n"
    assert run_line(tree, "find /home -name f*") == "/home/c/b/f\n"
    for line, message in (
        ("rm -r /home/c", "contains the current directory"),
        ("cp -r /home/c /home/c/b/x", "into itself"),
        ("rm ../../a", "Is a directory"),
        ("cat ../nowhere", "No such file"),
        ("mkdir ../b", "File exists"),
        ("mv f", "source and a target"),
        ("grep -n", "missing"),
    ):
        with pytest.raises(CommandError, match=message):
            run_line(tree, line)


@given(
    st.lists(
        st.sampled_from(
            [
                "echo a > f",
                "cat f | sort -u | wc -l",
                "mkdir d",
                "cp f d",
                "mv d e",
                "rm -r e",
                "cd d",
                "cd ..",
                "ls -a",
            ]
        )
    )
)
@settings(max_examples=50)
def test_no_sequence_of_commands_corrupts_the_tree(lines: list[str]) -> None:
    tree = FileTree()
    for line in lines:
        with suppress(CommandError):
            run_line(tree, line)
        assert tree.is_directory(tree.cwd)
        assert all(tree.is_directory(path.parent) for path in tree.below(tree.path("/")))


ODD_WORDS = [
    "²",
    "٣",
    "-n",
    "-²",
    "-3",
    "[z-a]",
    "-name",
    "..",
    "/",
    "//",
    "-rf",
    "\x85",
    "'",
    "|",
    ">",
    "a",
    "dir",
    "9" * 400,
]


@given(
    words=st.lists(st.sampled_from([*COMMANDS, *ODD_WORDS]) | st.text(max_size=5), max_size=6),
    command=st.sampled_from(sorted(COMMANDS)),
)
@example(words=["-n", "²", "a"], command="head")
def test_any_line_of_an_agent_is_answered(words: list[str], command: str) -> None:
    """An exception would make the episode unscorable, and the policy could learn to raise it."""
    env = Terminal()
    env.reset({"goal": "g", "files": {"a": "5\n²\n1e999\n\x85", "dir/b": "x"}, "expect": {"c": "d"}})
    assert env.step(" ".join([command, *words])).text


@pytest.mark.parametrize(
    ("action", "command"),
    [
        ("ls -a", "ls -a"),
        ("I will look.\n\n```bash\nls -a\n```\nThat is all.", "ls -a"),
        ("first think\n$ cat f", "cat f"),
        ("`pwd`", "pwd"),
        ("  \n ", ""),
    ],
)
def test_the_command_is_found_in_the_text_of_an_agent(action: str, command: str) -> None:
    assert command_of(action) == command


def test_a_question_is_the_text_of_the_task_and_the_reply_ends_the_episode() -> None:
    env = Question()
    assert env.reset({"id": "a", "question": "2 + 3?"}).text == "2 + 3?"
    assert env.step("5").done
    assert env.reset({"id": "b", "prompt": "Name a colour."}).text == "Name a colour."
    with pytest.raises(ValueError, match="its fields are id, problem"):
        env.reset({"id": "c", "problem": "2 + 3?"})


def test_a_question_may_be_a_conversation() -> None:
    env = Question()
    system, user = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 3?", "name": "a"}
    seen = env.reset({"prompt": [system, user], "answer": "5"})
    assert (seen.text, seen.earlier) == ("2 + 3?", (system,))
    assert env.reset({"prompt": [user]}).earlier == ()
    with pytest.raises(ValueError, match=r"the last message of the task must have the role 'user'; it is .*Be brief"):
        env.reset({"prompt": [user, system]})
    with pytest.raises(ValueError, match="the role 'user'"):
        env.reset({"prompt": []})
    with pytest.raises(
        ValueError, match=r"needs the strings `role` and `content`; one is \{'role': 'user', 'content': \["
    ):
        env.reset({"prompt": [{"role": "user", "content": [{"type": "image"}]}]})
