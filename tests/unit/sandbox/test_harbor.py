"""Harbor tasks: the format, the Dockerfiles that a sandbox builds, and verdicts of the verifier."""

import sys
import sysconfig
from pathlib import Path

import pytest

from rollbook.commands.checks.tasks import check_command, check_tasks
from rollbook.commands.output import EXIT_FAILED
from rollbook.envs.builtin.shell import Harbor
from rollbook.rollout.config import RolloutConfig
from rollbook.run.preflight.checks import times_below_tests
from rollbook.sandbox.harbor.dockerfile import Copy, DockerfileError, Run, read_dockerfile
from rollbook.sandbox.harbor.image import root_of
from rollbook.sandbox.harbor.task import HarborTaskError, read_task
from rollbook.sandbox.harbor.trial import open_trial
from rollbook.sandbox.harbor.verifier import VerifierError
from rollbook.tasks.config import TasksConfig
from rollbook.tasks.dataset import DatasetError, load_tasks
from tests.parts.sandbox.bubblewrap import require_bubblewrap
from tests.parts.sandbox.harbor import DOCKERFILE, TOML, write_task

HOST = {"*": "host"}


@pytest.fixture(scope="module")
def _bubblewrap() -> None:
    require_bubblewrap()


def test_a_dockerfile_gives_its_steps_variables_and_directory() -> None:
    recipe = read_dockerfile(
        '\ufeffFROM --platform=linux/amd64 debian:12 AS base\nARG V=2\nENV A="x y" B=$V\nENV OLD form\nWORKDIR /srv\nWORKDIR app\n'
        "COPY /a.txt b.txt ./\nCOPY one.txt two.txt\nRUN echo $A \\\n  # a comment\n\n  && true\n"
        'RUN\t["echo", "$A"]\nUSER root\nEXPOSE 80\n'
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
        ("FROM a\nRUN /usr/bin/apt-get update", r"'/usr/bin/apt-get' needs a network"),
        ("FROM a\nRUN cd /tmp; pip install pytest", r"'pip install' needs a network"),
        ("FROM a\nRUN (curl -s example.org)", r"'curl' needs a network"),
        ("FROM a\nFROM b", "one stage"),
        ("FROM a\nUSER app", "no user but root"),
        ("FROM a\nCOPY --from=build /x /y", "without options"),
        ("FROM a\nADD https://example.org/x /y", "only files of the directory"),
        ("FROM a\nRUN <<EOF\necho\nEOF", "here-documents"),
        ("FROM a\nRUN cat > /f <<-'END'\nhello\nEND", "line 2: RUN cat.*here-documents"),
        ("FROM a\nCOPY <<EOF /f\nhello\nEOF", "line 2: COPY.*here-documents"),
        ('FROM a\nSHELL ["bash"]', "SHELL is not supported"),
        ("ARG A=it's\nFROM a", "line 1: ARG A=it's: No closing quotation"),
        ('FROM a\nCOPY "a b c', "line 2: COPY.*No closing quotation"),
        ("FROM a\nENV", "line 2: ENV: its arguments are missing"),
    ],
)
def test_what_a_sandbox_cannot_build_is_refused_by_its_line(text: str, reason: str) -> None:
    with pytest.raises(DockerfileError, match=reason):
        read_dockerfile(text)
    read_dockerfile("FROM a\nRUN echo captured >> curly && mkdir -p /pipeline && echo $((1 << 3)) <<< word")


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
        ("[agent]\ntimeout_sec = 0", "timeout_sec = 0.0 must be a finite number above 0"),
        ("[verifier]\ntimeout_sec = inf", "timeout_sec = inf must be a finite number"),
        ("[environment]\nstorage = 'infG'", "storage_mb must be a whole number"),
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
    (tmp_path / "set/a/tests/test.sh").unlink()
    with pytest.raises(HarborTaskError, match=r"a: tests/test\.sh is missing"):
        load_tasks(TasksConfig(source="harbor:set"), base_dir=tmp_path)
    (tmp_path / "set/b/instruction.md").unlink()
    with pytest.raises(
        DatasetError, match=r"2 of 2 tasks are faulty, and `rollbook tasks check .*/set` names .*/a: tests/"
    ):
        load_tasks(TasksConfig(source="harbor:set"), base_dir=tmp_path)
    with pytest.raises(HarborTaskError, match="no Harbor tasks: no directory in it"):
        load_tasks(TasksConfig(source="harbor:set/a/tests"), base_dir=tmp_path)
    with pytest.raises(HarborTaskError, match="no Harbor tasks: it is not a directory"):
        load_tasks(TasksConfig(source="harbor:sat"), base_dir=tmp_path)


def test_times_of_the_rollout_below_those_of_the_tests_are_warned_of(tmp_path: Path) -> None:
    for name, seconds in (("quick", 5), ("slow", 300)):
        write_task(tmp_path / "set", name, toml=f"[verifier]\ntimeout_sec = {seconds}\n")
    tasks = load_tasks(TasksConfig(source="harbor:set"), base_dir=tmp_path)
    assert list(times_below_tests(RolloutConfig(step_s=301, max_seconds=900), tasks)) == []
    ((setting, warning),) = times_below_tests(RolloutConfig(step_s=120, max_seconds=900), tasks)
    assert setting == "rollout.step_s"
    assert "is 120 s, and the tests of slow may take 300 s" in warning
    assert [path for path, _ in times_below_tests(RolloutConfig(), tasks)] == ["rollout.step_s", "rollout.max_seconds"]


@pytest.mark.usefixtures("_bubblewrap")
async def test_an_agent_finds_the_image_and_the_verifier_scores_what_it_left(tmp_path: Path) -> None:
    task = read_task(write_task(tmp_path))
    for _ in range(2):  # built, then taken from the cache
        async with open_trial(task, images=HOST, cache=tmp_path / "cache") as trial:
            seen = await trial.sandbox.exec("pwd; cat data/readme.txt start.txt; tool; ls /tests /solution")
            assert seen.stdout == b"/app\na note\nstart\ntool\n"
            assert (await trial.sandbox.exec("echo hello > greeting.txt")).is_ok
            assert (await trial.verify()).reward == 1.0
    assert len(list((tmp_path / "cache").glob("*.tar"))) == 1


@pytest.mark.usefixtures("_bubblewrap")
async def test_a_file_is_copied_into_a_directory_that_exists_and_a_copy_that_fails_is_refused_by_its_line(
    tmp_path: Path,
) -> None:
    text = "FROM a\nWORKDIR /app\nCOPY start.txt /app\nCOPY . /all\n"
    task = read_task(write_task(tmp_path, "copied", dockerfile=text))
    async with open_trial(task, images=HOST, cache=tmp_path / "images") as trial:
        for folder in ("/app", "/all"):
            found = await trial.sandbox.read(f"{folder}/start.txt")
            assert found == (task.directory / "environment/start.txt").read_bytes()
    refused = [(name, rf"line 2: {name} cannot be copied to /usr/bin/ .*Read-only") for name in ("start.txt", "notes")]
    for number, (source, reason) in enumerate([*refused, ("none*", r"line 2: none\* is not in")]):
        task = read_task(write_task(tmp_path, f"refused{number}", dockerfile=f"FROM a\nCOPY {source} /usr/bin/\n"))
        with pytest.raises(DockerfileError, match=reason):
            async with open_trial(task, images=HOST, cache=tmp_path / "images"):
                pass


@pytest.mark.usefixtures("_bubblewrap")
async def test_an_agent_cannot_write_its_own_reward_or_tests(tmp_path: Path) -> None:
    task = read_task(write_task(tmp_path))
    loop = "while :; do mkdir -p /logs/verifier /tests; echo 1 > /logs/verifier/reward.txt; sleep .01; done"
    ready = """mkdir -p /logs/verifier; echo '{"reward": 1}' > /logs/verifier/reward.json"""
    async with open_trial(task, images=HOST, cache=tmp_path / "cache") as trial:
        await trial.sandbox.exec(f"setsid sh -c '{loop}' > /dev/null 2>&1 & {ready}")
        assert (await trial.verify()).reward == 0.0


def test_a_base_image_is_a_named_root_or_the_programs_of_this_machine_and_never_guessed(tmp_path: Path) -> None:
    named = tmp_path / "named"
    named.mkdir()
    images = {"debian:12": str(named), "node:20": "host"}
    assert root_of("debian:12", images) == named
    assert root_of("node:20", images) is None
    assert root_of("python:3.13", HOST) is None
    with pytest.raises(DockerfileError, match=r'FROM python:3.13: .*made by debootstrap.*{ "python:3.13" = "host" }'):
        root_of("python:3.13", images)
    with pytest.raises(DockerfileError, match="which is not a directory"):
        root_of("a", {"a": "/nowhere"})


@pytest.mark.usefixtures("_bubblewrap")
async def test_tests_run_in_a_root_that_has_settings_of_its_own(tmp_path: Path) -> None:
    """Those of the root are read-only: the agent cannot have written them, and they stay."""
    if not Path("/usr/bin/python3").exists():
        pytest.skip("this machine has no /usr/bin/python3 to make a root from")
    root = tmp_path / "root"
    (root / "etc" / "ssl").mkdir(parents=True)
    for name in ("profile", "ssl/openssl.cnf"):
        (root / "etc" / name).write_text("# of the root\n")
    for name in ("bin", "lib", "lib64"):
        (root / name).symlink_to(Path("usr", name))
    task = read_task(write_task(tmp_path, dockerfile="FROM a\nENV GREETING_FILE=greeting.txt\n"))
    own = {"/usr": Path("/usr")}
    async with open_trial(task, images={"a": str(root)}, cache=tmp_path / "cache", binds=own) as trial:
        assert (await trial.solve()).is_ok
        verdict = await trial.verify()
        kept = await trial.sandbox.exec("cat /etc/profile /etc/ssl/openssl.cnf")
    assert verdict.reward == 1.0, verdict.output
    assert kept.text == "# of the root\n" * 2


LOOK_AROUND = """#!/bin/bash
(bash -lc true; bash -ic true) 2> /dev/null
python3 -c pass; /usr/bin/python3 -c 'import hashlib'; /bin/python3 -c pass
perl -Mstrict -e 1
cat note.txt
grep -sqx hello greeting.txt && r=1 || r=0
echo $r > /logs/verifier/reward.txt
"""
BY_SHELL = "echo 1 > /logs/verifier/reward.json"
BY_PYTHON = "open('/logs/verifier/reward.json', 'w').write('1')"
BY_PERL = "open(F, '>', '/logs/verifier/reward.json'); print F 1; 1"
FORGERIES = {
    "a shell in the search path": f"""
        printf '#!/bin/sh\n{BY_SHELL}' > /app/bin/bash
        chmod 755 /app/bin/bash""",
    "files of a shell": f"""
        mkdir /etc/profile.d
        for file in ~/.profile ~/.bashrc /etc/profile /etc/bash.bashrc; do echo "{BY_SHELL}" > $file; done""",
    "settings of Python": f"""
        mkdir -p /etc/python3.{{9,10,11,12,13}}
        for directory in /etc/python3.*; do echo "{BY_PYTHON}" > $directory/sitecustomize.py; done""",
    "packages in the home": f"""
        directory=$(python3 -m site --user-site); mkdir -p $directory
        echo "{BY_PYTHON}" > $directory/usercustomize.py""",
    "a virtual environment": f"""
        standard={sysconfig.get_path("stdlib")}; forged=/evil/lib/$(basename $standard)
        mkdir -p /evil/bin $forged; ln -s $standard/* $forged
        echo "{BY_PYTHON}" > $forged/sitecustomize.py
        echo 'home = /evil/bin' | tee /pyvenv.cfg > {Path(sys.base_prefix, "pyvenv.cfg")}""",
    "modules of Perl": f"""
        mkdir -p /etc/perl
        echo "{BY_PERL}" > /etc/perl/strict.pm""",
    "a library that every program loads": "echo /nowhere/forged.so > /etc/ld.so.preload",
    "another loader": "cp -r /lib64/. /lib65; rm /lib64; mv /lib65 /lib64",
    "another /etc": "cp -r /etc /etc2; mv /etc /etc3; mv /etc2 /etc",
}


@pytest.mark.usefixtures("_bubblewrap")
@pytest.mark.parametrize("attack", FORGERIES.values(), ids=FORGERIES)
async def test_nothing_that_an_agent_plants_runs_before_the_tests_have_scored_it(tmp_path: Path, attack: str) -> None:
    task = read_task(write_task(tmp_path, test=LOOK_AROUND, dockerfile=DOCKERFILE + "RUN echo noted > /app/note.txt"))
    async with open_trial(task, images=HOST, cache=tmp_path / "cache") as trial:
        await trial.sandbox.exec(["bash", "-c", attack])
        verdict = await trial.verify()
    assert verdict.reward == 0.0
    assert verdict.output == "noted\n" or "not in their place" in verdict.output


RUINS = {
    "a full disk": "head -c 900M /dev/zero > /fill",
    "too many files": "seq 99500 | xargs touch",
    "no working directory": "cd /; rm -r /app",
    "a working directory without rights": "chmod 0 /app",
    "a file in its place": "cd /; mv /app /app2; touch /app",
    "a system in another place": "mv /etc /etc2",
    "shared memory that cannot be removed": "mkdir -p /dev/shm/a/b; chmod 0 /dev/shm/a",
    "programs without end for the tests": "printf 'while :; do sleep 9 & done' > greeting.txt",
}
RUNS_IT = "if [ -s greeting.txt ]; then sh greeting.txt; fi; echo 1 > /logs/verifier/reward.txt\n"


@pytest.mark.usefixtures("_bubblewrap")
@pytest.mark.parametrize("ruin", RUINS.values(), ids=RUINS)
async def test_an_agent_that_ruins_its_sandbox_gets_nothing_instead_of_another_try(tmp_path: Path, ruin: str) -> None:
    task = read_task(write_task(tmp_path, test=RUNS_IT))
    async with open_trial(task, images=HOST, cache=tmp_path / "cache") as trial:
        await trial.sandbox.exec(["bash", "-c", ruin])
        verdict = await trial.verify()
        assert verdict.reward == (1.0 if ruin.startswith("cd /; rm") else 0.0), verdict.output


@pytest.mark.usefixtures("_bubblewrap")
async def test_what_an_agent_leaves_in_the_way_of_the_tests_costs_it_nothing(tmp_path: Path) -> None:
    task = read_task(write_task(tmp_path))
    left = "mkdir -p /tests/a /logs; touch /logs/verifier; chmod 0 /tests/a; printf '#!/bin/sh' > bin/mkdir; chmod 755 bin/mkdir"
    for more in ("", "; rm -r /logs; touch /logs", "; chmod 555 /logs"):
        async with open_trial(task, images=HOST, cache=tmp_path / "cache") as trial:
            assert (await trial.sandbox.exec(f"{left}; echo hello > greeting.txt{more}")).is_ok
            verdict = await trial.verify()
            assert verdict.reward == 1.0, verdict.output


@pytest.mark.usefixtures("_bubblewrap")
async def test_settings_of_the_image_are_there_again_when_the_tests_run(tmp_path: Path) -> None:
    dockerfile = """FROM a
        RUN mkdir /etc/profile.d && echo WORD=own > /etc/profile.d/a.sh && echo '. /etc/profile.d/*.sh' > /etc/profile"""
    test = "bash -lc 'echo $WORD'; echo 1 > /logs/verifier/reward.txt"
    task = read_task(write_task(tmp_path, dockerfile=dockerfile, test=test))
    async with open_trial(task, images=HOST, cache=tmp_path / "cache") as trial:
        await trial.sandbox.exec("echo WORD=planted | tee /etc/profile > /etc/profile.d/a.sh")
        assert (await trial.verify()).output == "own\n"


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
    async with open_trial(task, images=HOST, cache=tmp_path / "cache") as trial:
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
    write_task(tmp_path, "slow", toml=TOML.replace("timeout_sec = 30", "timeout_sec = 0.2"), solve="sleep 60\n")
    build = TOML.replace("[environment]\n", "[environment]\nbuild_timeout_sec = 0.2\n")
    write_task(tmp_path, "built", toml=build, dockerfile="FROM a\nRUN sleep 60\n")
    write_task(tmp_path, "broken", solve="cat nothing\n")
    for name, missing in {"incomplete": "task.toml", "silent": "instruction.md"}.items():
        (write_task(tmp_path, name) / missing).unlink()
    (write_task(tmp_path, "empty") / "instruction.md").write_text("\n")
    checks = {check.name: check for check in await check_tasks(str(tmp_path), is_oracle=True, images=HOST)}
    assert (checks["good"].fault, checks["good"].solved, checks["good"].empty) == (None, 1.0, 0.0)
    faults = {name: str(check.fault) for name, check in checks.items() if check.fault is not None}
    assert faults["unsolvable"] == "the reference solution gets 0, and must get 1"
    assert faults["free"] == "doing nothing gets 1, and must get 0"
    assert "has no solution/solve.sh" in faults["unknown"]
    assert "'apt-get' needs a network" in faults["network"]
    assert "Read-only file system" in faults["readonly"]
    assert "ended after 0.2 s (agent.timeout_sec)" in faults["slow"]
    assert "line 2: /bin/sh -c sleep 60 took longer than 0.2 s (environment.build_timeout_sec)" in faults["built"]
    assert "it ended with code 1: cat: nothing: No such file" in faults["broken"]
    assert faults["incomplete"].endswith("incomplete: task.toml is missing")
    assert faults["silent"].endswith("silent: instruction.md is missing")
    assert "instruction.md is empty" in faults["empty"]
    assert {"good", *faults} == set(checks)


def test_tasks_with_the_same_fault_are_reported_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a", "b", "c", "d", "e"):
        write_task(tmp_path, name, dockerfile="FROM debian:12\n")
    assert check_command(str(tmp_path)) == EXIT_FAILED
    printed = capsys.readouterr()
    [line] = printed.out.splitlines()
    assert line.startswith("a, b, c and 2 more: FROM debian:12: there is no local root")
    assert "rollout.settings" in line
    assert line.endswith("--image debian:12=host")
    assert check_command(str(tmp_path), image=["debian:12=host"]) == 0
    assert "5 tasks, none with faults" in capsys.readouterr().err


@pytest.mark.usefixtures("_bubblewrap")
async def test_the_environment_plays_a_harbor_task(tmp_path: Path) -> None:
    environment = Harbor(images=HOST, cache=str(tmp_path / "cache"))
    row = {"path": str(write_task(tmp_path))}
    assert "Write the word hello" in (first := await environment.reset(row)).text
    assert (seen := await environment.step("cat start.txt")).text == "start\n"
    assert (first.last_action, seen.last_action) == ("submit", "submit"), (
        "the verifier runs at a limit of the rollout too"
    )
    assert not (await environment.step("echo hello > greeting.txt")).done
    last = await environment.step("submit")
    assert (last.done, last.solved, last.reward, last.last_action) == (True, True, 1.0, None)
    await environment.reset(row)
    assert (await environment.step("submit")).reward == 0.0
    await environment.close()


@pytest.mark.usefixtures("_bubblewrap")
async def test_commands_of_the_agent_run_no_longer_than_the_task_allows(tmp_path: Path) -> None:
    environment = Harbor(images=HOST, cache=str(tmp_path / "cache"))
    toml = TOML.replace("[agent]\ntimeout_sec = 30", "[agent]\ntimeout_sec = 1")
    await environment.reset({"path": str(write_task(tmp_path, toml=toml))})
    assert not (await environment.step("echo hello > greeting.txt; sleep 0.3")).done
    last = await environment.step("sleep 60")
    assert (last.done, last.reward) == (True, 1.0)
    assert "killed after 0." in last.text
