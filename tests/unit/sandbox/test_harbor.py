"""Harbor tasks: the format, the Dockerfiles that a sandbox builds, and verdicts of the verifier."""

from pathlib import Path

import pytest

from rollbook.commands.checks.tasks import check_tasks
from rollbook.envs.builtin.shell import Harbor
from rollbook.sandbox.harbor.dockerfile import Copy, DockerfileError, Run, read_dockerfile
from rollbook.sandbox.harbor.task import HarborTaskError, read_task
from rollbook.sandbox.harbor.trial import VerifierError, open_trial
from rollbook.tasks.config import TasksConfig
from rollbook.tasks.dataset import load_tasks
from tests.parts.sandbox.bubblewrap import require_bubblewrap
from tests.parts.sandbox.harbor import TOML, write_task


@pytest.fixture(scope="module")
def _bubblewrap() -> None:
    require_bubblewrap()


def test_a_dockerfile_gives_its_steps_variables_and_directory() -> None:
    recipe = read_dockerfile(
        'FROM --platform=linux/amd64 debian:12 AS base\nARG V=2\nENV A="x y" B=$V\nENV OLD form\nWORKDIR /srv\nWORKDIR app\n'
        "COPY a.txt b.txt ./\nCOPY one.txt two.txt\nRUN echo $A \\\n  # a comment\n  && true\n"
        'RUN ["echo", "$A"]\nUSER root\nEXPOSE 80\n'
    )
    assert (recipe.base, recipe.workdir) == ("debian:12", "/srv/app")
    assert recipe.env == {"A": "x y", "B": "2", "OLD": "form"}
    runs = [step for step in recipe.steps if isinstance(step, Run)]
    assert [run.command[-1] for run in runs] == ["/srv", "/srv/app", "echo $A    && true", "$A"]
    assert runs[2].env == {"V": "2", "A": "x y", "B": "2", "OLD": "form"}
    copies = [step for step in recipe.steps if isinstance(step, Copy)]
    assert [(copy.sources, copy.target) for copy in copies] == [
        (("a.txt", "b.txt"), "/srv/app/"),
        (("one.txt",), "/srv/app/two.txt"),
    ]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("RUN true", "the first instruction must be FROM"),
        ("# nothing", "has no FROM"),
        ("FROM a\nRUN apt-get update && apt-get install -y tmux", r"line 2.*'apt-get' needs a network"),
        ("FROM a\nRUN cd /tmp; pip install pytest", r"'pip install' needs a network"),
        ("FROM a\nRUN (curl -s example.org)", r"'curl' needs a network"),
        ("FROM a\nFROM b", "one stage"),
        ("FROM a\nUSER app", "no user but root"),
        ("FROM a\nCOPY --from=build /x /y", "without options"),
        ("FROM a\nADD https://example.org/x /y", "only files of the directory"),
        ("FROM a\nRUN <<EOF\necho\nEOF", "here-documents"),
        ('FROM a\nSHELL ["bash"]', "SHELL is not supported"),
    ],
)
def test_what_a_sandbox_cannot_build_is_refused_by_its_line(text: str, reason: str) -> None:
    with pytest.raises(DockerfileError, match=reason):
        read_dockerfile(text)
    read_dockerfile("FROM a\nRUN echo captured >> curly && mkdir -p /pipeline")


def test_limits_and_times_come_from_the_file(tmp_path: Path) -> None:
    task = read_task(write_task(tmp_path))
    assert (task.limits.memory_mb, task.limits.disk_mb) == (512, 64)
    assert (task.agent_timeout_s, task.verifier_timeout_s) == (30.0, 20.0)
    older = 'version = "1.0"\n[environment]\nmemory = "2G"\nstorage = "10G"\n'
    limits = read_task(write_task(tmp_path, "older", toml=older)).limits
    assert (limits.memory_mb, limits.disk_mb) == (2048, 2048)


@pytest.mark.parametrize(
    ("toml", "reason"),
    [
        ('schema_version = "9.0"', "version 9.0 is not known"),
        ("[environment]\ngpus = 1", "environment.gpus"),
        ('[[steps]]\nname = "a"', "steps"),
        ("[environment]\nmemory = 'much'", "memory_mb must be a whole number"),
        ("[agent]\ntimeout_sec = 0", "timeout_sec = 0.0 must be a number above 0"),
        ("[agent", "task.toml"),
    ],
)
def test_a_task_that_cannot_be_played_is_refused_with_the_reason(tmp_path: Path, toml: str, reason: str) -> None:
    with pytest.raises(HarborTaskError, match=reason):
        read_task(write_task(tmp_path, toml=toml))


def test_a_directory_of_tasks_is_a_source_of_rows(tmp_path: Path) -> None:
    for name in ("b", "a"):
        write_task(tmp_path / "set", name)
    tasks = load_tasks(TasksConfig(source="harbor:set"), base_dir=tmp_path)
    assert [task.id for task in tasks] == ["a", "b"]
    assert tasks[0].row["instruction"] == "Write the word hello into greeting.txt."
    assert tasks[0].row["difficulty"] == "easy"
    with pytest.raises(HarborTaskError, match="no Harbor tasks"):
        load_tasks(TasksConfig(source="harbor:set/a/tests"), base_dir=tmp_path)


@pytest.mark.usefixtures("_bubblewrap")
async def test_an_agent_finds_the_image_and_the_verifier_scores_what_it_left(tmp_path: Path) -> None:
    task = read_task(write_task(tmp_path))
    for _ in range(2):  # built, then taken from the cache
        async with open_trial(task, cache=tmp_path / "cache") as trial:
            seen = await trial.sandbox.exec("pwd; cat data/readme.txt start.txt; tool; ls /tests /solution")
            assert seen.stdout == b"/app\na note\nstart\ntool\n"
            assert (await trial.sandbox.exec("echo hello > greeting.txt")).is_ok
            assert (await trial.verify()).reward == 1.0
    assert len(list((tmp_path / "cache").glob("*.tar"))) == 1


@pytest.mark.usefixtures("_bubblewrap")
async def test_an_agent_cannot_write_its_own_reward_or_tests(tmp_path: Path) -> None:
    task = read_task(write_task(tmp_path))
    loop = "while :; do mkdir -p /logs/verifier /tests; echo 1 > /logs/verifier/reward.txt; sleep .01; done"
    ready = """mkdir -p /logs/verifier; echo '{"reward": 1}' > /logs/verifier/reward.json"""
    async with open_trial(task, cache=tmp_path / "cache") as trial:
        await trial.sandbox.exec(f"setsid sh -c '{loop}' > /dev/null 2>&1 & {ready}")
        assert (await trial.verify()).reward == 0.0


@pytest.mark.usefixtures("_bubblewrap")
@pytest.mark.parametrize(
    ("written", "reward"),
    [
        ("echo 0.25 > /logs/verifier/reward.txt", 0.25),
        ("""echo '{"reward": 0.5, "style": 1}' > /logs/verifier/reward.json; exit 1""", 0.5),
        ("""echo '{"a": 1, "b": 0}' > /logs/verifier/reward.json""", 0.5),
        ("exit 1", "wrote neither reward.txt nor reward.json"),
        ("echo many > /logs/verifier/reward.txt", "cannot be read"),
        ("echo nan > /logs/verifier/reward.txt", "no finite number"),
        ("sleep 60", "took longer than 1 s"),
    ],
)
async def test_a_verifier_gives_a_reward_or_the_episode_is_not_scored(
    tmp_path: Path, written: str, reward: float | str
) -> None:
    toml = TOML.replace("timeout_sec = 20.0", "timeout_sec = 1.0") if "sleep" in written else TOML
    task = read_task(write_task(tmp_path, toml=toml, dockerfile="FROM scratch", test=f"{written}\n"))
    async with open_trial(task, cache=tmp_path / "cache") as trial:
        if isinstance(reward, float):
            assert (await trial.verify()).reward == reward
        else:
            with pytest.raises(VerifierError, match=reward):
                await trial.verify()


@pytest.mark.usefixtures("_bubblewrap")
async def test_the_oracle_check_names_each_faulty_task(tmp_path: Path) -> None:
    write_task(tmp_path, "good")
    write_task(tmp_path, "unsolvable", solve="echo wrong > greeting.txt\n")
    write_task(tmp_path, "free", test="echo 1 > /logs/verifier/reward.txt\n")
    write_task(tmp_path, "unknown", solve=None)
    write_task(tmp_path, "network", dockerfile="FROM a\nRUN apt-get install -y tmux\n")
    write_task(tmp_path, "readonly", dockerfile="FROM a\nRUN touch /usr/bin/tool\n")
    checks = {check.name: check for check in await check_tasks(str(tmp_path), is_oracle=True)}
    assert (checks["good"].fault, checks["good"].solved, checks["good"].empty) == (None, 1.0, 0.0)
    faults = {name: str(check.fault) for name, check in checks.items() if check.fault is not None}
    assert faults["unsolvable"] == "the reference solution gets 0, and must get 1"
    assert faults["free"] == "doing nothing gets 1, and must get 0"
    assert "has no solution/solve.sh" in faults["unknown"]
    assert "'apt-get' needs a network" in faults["network"]
    assert "Read-only file system" in faults["readonly"]
    assert set(faults) == {"unsolvable", "free", "unknown", "network", "readonly"}


@pytest.mark.usefixtures("_bubblewrap")
async def test_the_environment_plays_a_harbor_task(tmp_path: Path) -> None:
    environment = Harbor(cache=str(tmp_path / "cache"))
    row = {"path": str(write_task(tmp_path))}
    assert "Write the word hello" in (await environment.reset(row)).text
    assert (await environment.step("cat start.txt")).text == "start\n"
    assert not (await environment.step("echo hello > greeting.txt")).done
    last = await environment.step("submit")
    assert (last.done, last.solved, last.reward) == (True, True, 1.0)
    await environment.reset(row)
    assert (await environment.step("submit")).reward == 0.0
    await environment.close()
