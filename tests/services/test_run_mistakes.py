"""The mistakes of a first hour: each is reported before the run starts, with the line of the config file and of the user's code.

`python -m tests.services.test_run_mistakes` prints each message with the seconds until it appeared. On a busy machine, the CPU
seconds say how long it takes on an idle one.
"""

import io
import re
import resource
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from rich.console import Console

from rollbook.commands.checks.config import check_command
from rollbook.commands.training.train import resolve_run, write_or_check_config
from rollbook.contracts.errors import RollbookError
from rollbook.run.config.run import ConfigError, dump_toml, load_config
from rollbook.run.config.sft import load_sft_config
from rollbook.run.config.study import load_study
from rollbook.run.directory import RunDirectory
from rollbook.run.preflight import report
from rollbook.run.preflight.checks import unreachable_lengths
from rollbook.run.preflight.report import check_run

CONFIG = """\
[run]
name = "mine"

[model.build]
tokenizer = "bytes"
hidden_size = 32
layers = 1
heads = 2
chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\\n{% endfor %}assistant: "

[tasks]
source = "mine:tasks"

[env]
name = "mine:Coin"

[rollout]
max_total_tokens = 200
completions_per_prompt = 4

[rollout.rewards.functions.right]
path = "mine:right"

[trainer]
max_steps = 2
"""

CODE = """\
from rollbook.contracts.task import Observation


def tasks():
    yield {"id": "one", "side": "heads"}


class Coin:
    is_quick = True

    def reset(self, task):
        self.side = task["side"]
        return Observation(text="heads or tails?")

    def step(self, action):
        return Observation(text="", reward=float(action == self.side), done=True)

    def close(self):
        pass


def right(case):
    return float(case.response == case.row["side"])
"""

AGENT = """

def solve(row, base_url):
    import json, urllib.request
    body = json.dumps({"model": "policy", "messages": [{"role": "user", "content": row["side"]}]}).encode()
    request = urllib.request.Request(base_url + "/chat/completions", body, {"Content-Type": "application/json"})
    reply = json.load(urllib.request.urlopen(request))
    return float(reply["choices"][0]["text"] == row["side"])
"""

ROLLOUT = """

def make_rollout(setup):
    async def rollout(row):
        return {"reward": 1.0}

    return rollout
"""


@dataclass(frozen=True, kw_only=True)
class Mistake:
    config: tuple[str, str] = ("", "")
    """A string of the config file and its replacement."""
    code: tuple[str, str] = ("", "")
    expected: tuple[str, ...]
    """Patterns of the message."""
    is_warning: bool = False
    run_dir: str = "run"


MISTAKES = {
    "a turn ends with a token that does not end generation": Mistake(
        config=("{{ m.content }}\\n{% endfor %}", "{{ m.content }}<bos>{% endfor %}"),
        expected=(r"model\.build: the chat template ends a turn of the assistant with '<bos>'.*ends at <eos>",),
        is_warning=True,
    ),
    "misspelt field": Mistake(
        config=("max_steps = 2", "max_stps = 2"),
        expected=(r"run\.toml:25: trainer\.max_stps: unknown field; did you mean 'max_steps'\?",),
    ),
    "wrong task function": Mistake(
        config=("mine:tasks", "mine:task"),
        expected=(r"run\.toml:12: tasks\.source: .*module mine has no 'task'.*did you mean 'tasks'\?",),
    ),
    "task function that raises": Mistake(
        code=('yield {"id": "one", "side": "heads"}', 'yield {"id": undefined}'),
        expected=(r"tasks\.source: .*NameError", r'File ".*mine\.py", line 5, in tasks', r"undefined"),
    ),
    "missing model": Mistake(
        config=("[model.build]\n", '[model]\npath = "./modell"\n[model.biuld]\n'),
        expected=(r"run\.toml:6: model\.biuld: unknown field; did you mean 'build'\?",),
    ),
    "missing model directory": Mistake(
        config=(CONFIG[CONFIG.index("[model") : CONFIG.index("[tasks")], '[model]\npath = "./modell"\n\n'),
        expected=(r"run\.toml:5: model\.path: there is no directory .*modell",),
    ),
    "missing template": Mistake(
        config=('chat_template = "{', '# chat_template = "{'),
        expected=(r"run\.toml:4: model: this tokenizer has no chat template",),
    ),
    "reward that raises": Mistake(
        code=("float(case.response ==", "float(case.respnse =="),
        expected=(
            r"run\.toml:22: rollout\.rewards\.functions\.right\.path: AttributeError: .*'respnse'",
            r'File ".*mine\.py", line 23, in right',
            r"return float\(case\.respnse",
        ),
    ),
    "reward that returns a string": Mistake(
        code=('float(case.response == case.row["side"])', '"right"'),
        expected=(r"functions\.right\.path: returned a str; it must return a number",),
    ),
    "reward that returns None": Mistake(
        code=("return float(case", "float(case"),
        expected=(r"warning: .*functions\.right\.path: returned None .* has no reward",),
        is_warning=True,
    ),
    "reward that returns NaN": Mistake(
        code=('float(case.response == case.row["side"])', 'float("nan")'),
        expected=(r"warning: .*functions\.right\.path: returned nan .* has no reward",),
        is_warning=True,
    ),
    "reset that raises": Mistake(
        code=('task["side"]\n', 'task["sides"]\n'),
        expected=(
            r"run\.toml:15: env\.name: env mine:Coin\.reset raised KeyError: 'sides'",
            r'File ".*mine\.py", line 12, in reset',
        ),
    ),
    "step of the wrong shape": Mistake(
        code=('return Observation(text="", reward=float(action == self.side), done=True)', 'return "", 1.0, True'),
        expected=(r"env\.name: env mine:Coin: step returned tuple instead of an Observation",),
    ),
    "rollout of the wrong shape": Mistake(
        config=("[rollout]\n", '[rollout]\nfunction = "mine"\n'),
        code=(CODE, CODE + ROLLOUT),
        expected=(r"run\.toml:18: rollout\.function: rollout returned a dict; it must return a RolloutSample or None",),
    ),
    "agent that raises": Mistake(
        config=("[rollout]\n", '[rollout]\nfunction = "agent"\nsettings = { agent = "mine:solve" }\n'),
        code=(CODE, CODE + AGENT),
        expected=(
            r"run\.toml:19: rollout\.settings\.agent: the agent raised KeyError: 'text'",
            r'File ".*mine\.py", line \d+, in solve',
            r"--no-preflight skips this check",
        ),
    ),
    "misspelt setting of a rollout": Mistake(
        config=(
            "[rollout]\n",
            '[rollout]\nfunction = "agent"\nsettings = { agent = "mine:solve", rewrad = "mine:right" }\n',
        ),
        code=(CODE, CODE + AGENT),
        expected=(r"run\.toml:19: rollout\.settings: rewrad: unknown field; did you mean 'reward'\?",),
    ),
    "too small token limit": Mistake(
        config=("max_total_tokens = 200", "max_total_tokens = 20"),
        expected=(r"run\.toml:18: rollout\.max_total_tokens: .*first prompt has \d+ tokens.*20 leaves none to sample",),
    ),
    "answers longer than an episode": Mistake(
        config=("[rollout]\n", "[rollout]\nsampling = { max_tokens = 500 }\n"),
        expected=(
            r"rollout\.sampling\.max_tokens: is 500, but rollout\.max_total_tokens = 200 cuts answers before that",
        ),
        is_warning=True,
    ),
    "episodes longer than the context": Mistake(
        config=("max_total_tokens = 200", "max_total_tokens = 99999"),
        expected=(
            r"run\.toml:18: rollout\.max_total_tokens: is 99999, but episodes end at the model's context of \d+ tokens",
        ),
        is_warning=True,
    ),
    "judge that is not running": Mistake(
        config=(
            'path = "mine:right"',
            'path = "mine:right"\n[rollout.rewards.functions.kind]\n'
            'judge = { url = "http://127.0.0.1:9/v1", model = "m", rubric = "r" }',
        ),
        expected=(
            r"rewards\.functions\.kind\.judge: nothing answers at http://127\.0\.0\.1:9/v1 \(.*refused.*\): start its server",
        ),
        is_warning=True,
    ),
    "empty tasks": Mistake(
        code=('    yield {"id": "one", "side": "heads"}', "    return []"),
        expected=(r"run\.toml:12: tasks\.source: mine:tasks has no tasks",),
    ),
    "unwritable run directory": Mistake(
        run_dir="run.toml/run",
        expected=(r"--run-dir: the run directory .* cannot be created: .*run\.toml is not a directory",),
    ),
    "three mistakes at once": Mistake(
        config=("max_total_tokens = 200", "max_total_tokens = 20"),
        code=("float(case.response ==", "float(case.respnse =="),
        run_dir="run.toml/run",
        expected=(r"run\.toml: 3 faults",),
    ),
    "user code that prints and ends the process": Mistake(
        code=("self.side = task", "print('here'); import os; os._exit(7); self.side = task"),
        expected=(r"env\.name: resetting the environment ended the process with exit code 7",),
    ),
}


def write(mistake: Mistake, directory: Path) -> Path:
    (directory / "run.toml").write_text(CONFIG.replace(*mistake.config) if mistake.config[0] else CONFIG)
    (directory / "mine.py").write_text(CODE.replace(*mistake.code) if mistake.code[0] else CODE)
    return directory / "run.toml"


def message_of(mistake: Mistake, directory: Path) -> str:
    """The error or the warnings that `rollbook train` reports before it starts anything."""
    config = write(mistake, directory)
    run = RunDirectory(directory / mistake.run_dir)
    try:
        found = check_run(load_config(config), (), directory=run)
    except ConfigError as error:
        return str(error)
    return "\n".join(f"warning: {warning}" for warning in found.warnings)


# Imports take nearly all of the time of a check: this process imports once, and forks each check.
CHECKER = """
import os, socket, sys
from rollbook.run.preflight import checks

with socket.socket(fileno=int(sys.argv[1])) as listener:
    while True:
        client, _ = listener.accept()
        with client:
            streams = socket.recv_fds(client, 1, 3)[1]
            if (child := os.fork()) == 0:
                for number, stream in enumerate(streams):
                    os.dup2(stream, number)
                sys.exit(checks.main())
            client.send(bytes([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) % 256]))
        for stream in streams:
            os.close(stream)
"""
# In place of a check: passes its streams on, and ends as the check does.
CLIENT = """
import socket, sys
with socket.socket(socket.AF_UNIX) as checker:
    checker.connect(sys.argv[1])
    socket.send_fds(checker, [b"-"], [0, 1, 2])
    sys.exit(checker.recv(1)[0])
"""


@pytest.fixture(scope="module")
def checker() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listener:
        address = f"{folder}/checker"
        listener.bind(address)
        listener.listen()
        number = listener.fileno()
        with subprocess.Popen([sys.executable, "-c", CHECKER, str(number)], pass_fds=(number,)) as process:
            yield address
            process.kill()


@pytest.fixture(autouse=True)
def _forked_checks(checker: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "python_command", lambda module: [sys.executable, "-I", "-S", "-c", CLIENT, checker])


@pytest.mark.parametrize("mistake", [pytest.param(one, id=name.replace(" ", "_")) for name, one in MISTAKES.items()])
def test_a_mistake_is_reported_with_its_line_before_anything_starts(mistake: Mistake, tmp_path: Path) -> None:
    message = message_of(mistake, tmp_path)
    assert message.startswith("warning: ") == mistake.is_warning, message
    for pattern in mistake.expected:
        assert re.search(pattern, message), message
    assert not (tmp_path / "run").exists()


def test_train_prints_the_faults_and_creates_no_run_directory(tmp_path: Path) -> None:
    code, message, _ = train(MISTAKES["empty tasks"], tmp_path)
    assert code == 2
    assert "tasks.source" in message
    assert not (tmp_path / "run").exists()


def test_config_check_reports_faults_of_the_file_and_of_the_code_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mistake = Mistake(
        config=("max_steps = 2", 'learning_rate = 1e-3\nmax_stps = 2\nwarmup_steps = 2\ndevice = "gpu"'),
        code=("float(case.response ==", "float(case.respnse =="),
        expected=(),
    )
    with pytest.raises(ConfigError) as caught:
        check_command(write(mistake, tmp_path))
    faults = [(fault.place.rpartition(":")[2], fault.path) for fault in caught.value.faults]
    assert faults == [
        ("22", "rollout.rewards.functions.right.path"),
        ("25", "trainer.learning_rate"),
        ("26", "trainer.max_stps"),
        ("27", "trainer.warmup_steps"),
        ("28", "trainer.device"),
    ]
    assert not capsys.readouterr().out


def test_config_check_reports_two_faults_of_the_same_setting(tmp_path: Path) -> None:
    small = "max_steps = 2\n\n[inference]\nmax_model_len = 19"
    file = write(Mistake(config=("max_steps = 2", small), expected=()), tmp_path)
    with pytest.raises(ConfigError) as caught:
        check_command(file, ["rollout.max_total_tokens=20"])
    first, second = caught.value.faults
    assert first.path == second.path == "rollout.max_total_tokens"
    assert "do not fit inference.max_model_len = 19" in first.message
    assert "first prompt has" in second.message


def test_config_check_reports_a_module_that_does_not_exist_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        check_command(write(Mistake(config=("mine:right", "mien:right"), expected=()), tmp_path))
    (fault,) = caught.value.faults
    assert fault.path == "rollout.rewards.functions.right.path"
    assert "no module 'mien'" in fault.message


def test_config_check_reports_a_tool_that_is_no_python_once(tmp_path: Path) -> None:
    tools = "[rollout]\nfunction = 'tools'\nsettings = { tools = ['tool:call'] }\n"
    (tmp_path / "tool.py").write_text("def call(", encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        check_command(write(Mistake(config=("[rollout]\n", tools), expected=()), tmp_path))
    (fault,) = caught.value.faults
    assert fault.path == "rollout.settings.tools"
    assert "tool.py cannot be read as Python: SyntaxError" in fault.message


def test_config_check_of_a_run_directory_checks_what_a_resume_would_use(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loaded, directory = resolve_run(write(Mistake(expected=()), tmp_path), tmp_path / "run", [])
    directory.prepare()
    write_or_check_config(loaded, directory, Console(file=io.StringIO()))
    (tmp_path / "run.toml").unlink()
    check_command(directory.path)
    assert 'env]\nname = "mine:Coin"' in capsys.readouterr().out, "the user's module is found"
    (tmp_path / "mine.py").write_text(CODE.replace("case.response", "case.respnse"), encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        check_command(directory.path, ["run.seed=3", "trainer.max_steps=3"])
    changed, code = sorted(caught.value.faults, key=lambda fault: fault.place)
    assert str(changed) == "--set: run.seed: is 3 here and was 0 when this run began; start a new run for that"
    assert "respnse" in code.message
    assert code.place.startswith(f"{directory.config_file}:")


def test_a_file_for_another_command_is_named_as_such(tmp_path: Path) -> None:
    demonstrations = tmp_path / "sft.toml"
    demonstrations.write_text('[model]\npath = "."\n[sft]\ndata = "chats.jsonl"\n', encoding="utf-8")
    with pytest.raises(ConfigError, match=r"sft\.toml:3: sft: this is a file for `rollbook sft`") as caught:
        check_command(demonstrations)
    assert len(caught.value.faults) == 1
    with pytest.raises(ConfigError, match=r"run\.toml:11: tasks: this is a file for `rollbook train`") as caught:
        load_sft_config(write(Mistake(expected=()), tmp_path))
    assert len(caught.value.faults) == 1
    with pytest.raises(ConfigError, match=r"run\.toml:11: tasks: this is a file for `rollbook train`") as caught:
        load_study(tmp_path / "run.toml")
    assert len(caught.value.faults) == 1


def test_a_directory_in_place_of_a_run_file_names_the_files_in_it(tmp_path: Path) -> None:
    write(Mistake(expected=()), tmp_path)
    with pytest.raises(RollbookError, match=rf"Is {re.escape(str(tmp_path))}/run\.toml meant\?"):
        check_command(tmp_path)
    with pytest.raises(RollbookError, match=rf"Is {re.escape(str(tmp_path))}/run\.toml meant\?"):
        load_config(tmp_path)


def test_config_check_says_that_code_was_not_run_where_it_depends_on_a_fault(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mistake = Mistake(
        config=("max_total_tokens = 200", 'max_total_tokens = "many"'),
        code=("float(case.response ==", "float(case.respnse =="),
        expected=(),
    )
    with pytest.raises(ConfigError) as caught:
        check_command(write(mistake, tmp_path))
    assert [fault.path for fault in caught.value.faults] == ["rollout.max_total_tokens"]
    assert "your code, because rollout.max_total_tokens must be corrected first" in " ".join(
        capsys.readouterr().err.split()
    )


def test_a_default_length_that_the_context_cuts_is_no_mistake_of_the_user(tmp_path: Path) -> None:
    mistake = Mistake(config=("max_total_tokens = 200\n", ""), expected=())
    loaded = load_config(write(mistake, tmp_path))
    assert not [*unreachable_lengths(loaded.config.rollout, 64)]
    resolved = tmp_path / "config.toml"
    resolved.write_text(dump_toml(loaded.config), encoding="utf-8")
    resumed = load_config(resolved).config.rollout
    assert "max_total_tokens" in resumed.model_fields_set
    assert not [*unreachable_lengths(resumed, 64)]


def test_config_check_reports_an_interpreter_that_does_not_exist_once(tmp_path: Path) -> None:
    mistake = Mistake(
        config=(
            'source = "mine:tasks"\n\n[env]\nname = "mine:Coin"',
            '[env]\nname = "verifiers:sums"\npython = "no/python"',
        ),
        expected=(),
    )
    with pytest.raises(ConfigError) as caught:
        check_command(write(mistake, tmp_path))
    assert [fault.path for fault in caught.value.faults] == ["env.python"]


def test_config_check_prints_what_differs_from_the_defaults_and_in_full_every_setting(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(Mistake(expected=()), tmp_path)
    check_command(file)
    short = capsys.readouterr().out
    check_command(file, preflight=False, full=True)
    assert "max_steps = 2" in short
    assert "checkpoint_every" not in short
    assert "checkpoint_every = 20" in capsys.readouterr().out


def train(mistake: Mistake, directory: Path) -> tuple[int, str, float]:
    """The exit code, the message and the seconds of `rollbook train`, or of `config check` where a run would go on."""
    write(mistake, directory)
    verb = ("config", "check") if mistake.is_warning else ("train",)
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "rollbook", *verb, "run.toml", "--run-dir", mistake.run_dir],
        capture_output=True,
        text=True,
        check=False,
        cwd=directory,
    )
    return done.returncode, done.stderr, time.monotonic() - began


if __name__ == "__main__":
    for name, mistake in MISTAKES.items():
        with tempfile.TemporaryDirectory() as folder:
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            exit_code, text, seconds = train(mistake, Path(folder))
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
            sys.stdout.write(f"## {name}: {seconds:.1f} s, {cpu_s:.1f} CPU seconds, exit code {exit_code}\n{text}\n")
            sys.stdout.flush()
