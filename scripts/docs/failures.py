"""Prints docs/failures.md from the tables in the code: `python -m scripts.docs.failures`."""

import sys

from rollbook.envs.client.remote import ABSENT_S as ENV_ABSENT_S
from rollbook.inference.weights.client import FAILING_S, MAX_FAILURES
from rollbook.rollout.dispatch.failure_breaker import MAX_CONSECUTIVE, MAX_SHARE, WINDOW
from rollbook.rollout.groups.failures import FAILURES, OUTCOMES, FailureAction
from rollbook.rollout.workers.handle import SLOW_START_S
from rollbook.rollout.workers.pool import MAX_BARREN_DEATHS, MAX_FAILED_STARTS
from rollbook.run.policy_clients import ABSENT_S
from rollbook.run.supervision.exits import RestartRule
from rollbook.run.supervision.supervisor import SLOW_START_S as PROCESS_SLOW_START_S
from rollbook.telemetry.waits import REPORT_S

RULE = RestartRule()
MEANINGS = {
    FailureAction.DROP_SAMPLE: "the sample stays in its group as unscorable, or is missing from it; it is not played again, has no "
    "advantage, and is counted",
    FailureAction.RETRY_SAMPLE: "the sample is played again within the group's `rollout.retry_budget` and lease; "
    "then it is dropped",
    FailureAction.FAIL_GROUP: "the group is stored as dropped(invalid) with its causes, and the failure breaker counts it",
    FailureAction.REPLACE_WORKER: "the process is replaced, and its groups get another attempt from the ledger, "
    "`gate.max_attempts` in all",
    FailureAction.STOP_RUN: "the run stops with exit code 1 and an error that says what a person must do",
}

DEADLINES: tuple[tuple[str, str, str], ...] = (
    (
        "a group",
        "`gate.group_deadline_s`",
        "released; the event `rollout.group_stalled` has the stacks of its episodes",
    ),
    (
        "an episode",
        "`rollout.max_seconds` without waits, then `rollout.grace_s`",
        "ends as truncated; a rollout function that continues is cancelled",
    ),
    ("a policy request", "`inference.request_s`, retries included", "retried sample"),
    (
        "a policy server without weights, while the trainer starts or replays",
        "none: the trainer's own limits end the run",
        "no group is opened; groups in play are released at their deadline",
    ),
    ("a reset or step of an environment", "`rollout.step_s`", "retried sample"),
    ("waiting for an environment", "`rollout.open_s`", "retried sample"),
    ("a reward function", "`rollout.rewards.timeout_s`", "its process is killed and replaced; dropped sample"),
    ("loading reward functions", "`rollout.rewards.start_s`", "stopped run"),
    (
        "a worker's start",
        "`rollout.worker_start_s`",
        "stopped run with the worker's stacks, if no worker has ever been ready; else replaced worker",
    ),
    ("a worker's heartbeat", "`rollout.worker_silence_s`", "its stack is logged; replaced worker"),
    ("a worker's stop", "`rollout.worker_stop_s`", "stop message, SIGTERM, SIGKILL"),
    ("a request to the ledger", "`ledger.request_s`, retries included", "the requesting process is restarted"),
    ("a push of weights", "`trainer.publish_timeout_s`", "the trainer is restarted"),
    ("a process's heartbeat", "`run.silence_s`", "its stack is logged; it is killed and restarted"),
    ("a process's start", "`run.ready_s`", "stopped run"),
)

WAITS: tuple[tuple[str, str, str], ...] = (
    (
        "trainer: the policy servers load weights, and a server fails (500, wrong digest)",
        f"{REPORT_S:g} s: the server's exception",
        f"{MAX_FAILURES} failures and {FAILING_S:g} s: stopped run with the exception, or replica quarantine if another replica "
        "has the weights",
    ),
    (
        "trainer: the policy servers load weights, and none responds",
        f"{REPORT_S:g} s",
        f"at `inference.urls`, if nothing ever listened there: {ABSENT_S:g} s, stopped run. Else `trainer.publish_timeout_s`, then "
        "the trainer is restarted",
    ),
    (
        "trainer: the next batch",
        "its status: `waiting for batch N`; the rollout process says why there is none",
        "when there is one: the dispatcher's limits end the run",
    ),
    (
        "trainer: ranks on other machines",
        "its status: `waiting for N trainer ranks`",
        "none: a person or a batch system starts them",
    ),
    (
        "any process: the ledger responds",
        f"{REPORT_S:g} s: the error",
        "`ledger.request_s`, then the process is restarted. 4xx and 500: stopped run at once",
    ),
    (
        "rollout: a policy server has weights",
        f"its status at once; a server that does not respond: {REPORT_S:g} s",
        "when it has: the trainer's limits end the run",
    ),
    (
        "rollout: a worker starts (imports, environments, reward functions)",
        f"{SLOW_START_S:g} s: the line of code where it is",
        "`rollout.worker_start_s`. If none was ever ready: stopped run",
    ),
    (
        "rollout: a worker that finishes a group",
        "at once: the last output of the worker that died",
        f"{MAX_FAILED_STARTS + 1} deaths before any worker was ready, or {MAX_BARREN_DEATHS + 1} without a finished group: "
        "stopped run",
    ),
    (
        "worker: the environment server at `env.url`",
        f"{REPORT_S:g} s: the error",
        f"if nothing listens there: {ENV_ABSENT_S:g} s, else 60 s; then the worker fails, as above",
    ),
    (
        "worker: a policy request",
        f"{REPORT_S:g} s in which none succeeded: the error",
        "`inference.request_s`: retried sample",
    ),
    (
        "evaluation: its workers, the ledger",
        "as above",
        "as above; the evaluation ends, and training continues",
    ),
    (
        "supervisor: a process is ready",
        f"its status at once; {PROCESS_SLOW_START_S:g} s: the line of code where it is",
        "`run.ready_s`: stopped run with its stacks",
    ),
    (
        "supervisor: a lease in a shared ledger",
        "at once: the holder",
        "when the lease of the other supervisor has ended",
    ),
    (
        "ledger: the database",
        "5 s: the event `ledger.store_stalled`",
        "none: requests fail after `ledger.request_s`",
    ),
    ("`rollbook join`: the run is announced", "at once", "none: Ctrl-C"),
)

MACHINE_FAULTS: tuple[tuple[str, str], ...] = (
    (
        "the disk is full, read-only or reports errors",
        "the process that cannot write stops the run with the path and what to do; nothing that was acknowledged is lost",
    ),
    (
        "the run directory is moved, deleted or unmounted",
        "the supervisor notices within a second and stops the run; put the directory back",
    ),
    (
        "the clock is set, by any amount",
        "nothing: leases use a steady clock. After a restart with an earlier clock, a lease is as long as a new one",
    ),
    (
        "a training step does not fit into the memory of its device",
        "it is trained with gradient checkpointing and smaller passes ([memory of a step](training.md#memory-of-a-step)). If even "
        "the longest sequence alone does not fit, or the state of the optimizer, the run stops with the sizes and the settings "
        "that help",
    ),
    (
        "a policy server has no memory for new weights, an adapter, a forward or its captured steps",
        "its cache of keys and values gets smaller, and requests wait for it. If it cannot get smaller, the update is refused, "
        "and the run stops with the sizes and the settings that help. A server whose weights were replaced only in part ends its "
        "requests and samples nothing until an update succeeds",
    ),
    (
        "the trainer has no memory for the copy of its weights that policy servers read",
        "it frees what only late servers read, and tries once more; then the run stops",
    ),
    (
        "a process has no memory for anything else, such as loading the model",
        "the run stops with what the process did, the plan of that GPU, and the settings that help. A process that was healthy "
        "before is started again first: the memory of its last incarnation may not have been free yet",
    ),
    (
        "the process that owns the shared base of adapters dies",
        "trainer and policy servers are ended, and started again when it is loaded. Steps since the last checkpoint are trained "
        "again from the record, with the same bits",
    ),
    ("no process or thread can be started", "the run stops and names the limit to raise"),
    (
        "too few open files are allowed",
        "`rollbook train` raises the limit as far as the system allows and refuses to start below 256. A process that reaches the "
        "limit later stops the run",
    ),
    (
        "another program sends SIGTERM to a process",
        "the process is started again. SIGTERM to the supervisor, alone or with all its processes, drains the run",
    ),
)

CLUSTER_FAULTS: tuple[tuple[str, str, str], ...] = (
    (
        "a machine with processes that joined is lost",
        "requests to its policy server move to others at once; its groups get another attempt",
        "15 s (its leases end)",
    ),
    ("a link is cut for less than 15 s", "requests wait and are repeated", "when the link is back"),
    (
        "a link is cut for longer",
        "as a lost machine. When it returns, its processes join again as new members. Groups that they finished meanwhile are "
        "stored once, or reported as settled. A trainer that was replaced is refused by the ledger and by every policy server",
        "15 s",
    ),
    ("a link is slow or loses packets", "the run continues, more slowly", "-"),
    (
        "the disk of a machine that joined is full",
        "a policy server that cannot store weights is put into replica quarantine: it gets no requests until it has loaded a "
        "publication. A dispatcher continues",
        "`inference.confirm_s`",
    ),
    (
        "the database restarts or is killed",
        "requests wait, at most `ledger.request_s`. After 5 s the event `ledger.store_stalled` says so",
        "when it accepts connections",
    ),
    (
        "the synchronous standby of the database is lost",
        "no commit completes: the same",
        "when the standby is back",
    ),
    (
        "the database fails over to a standby",
        "the same. With a synchronous standby nothing is lost; otherwise see [several machines](several-machines.md)",
        "when the standby is promoted",
    ),
    (
        "the machine of `rollbook train` is lost",
        "`rollbook train RUN_DIR` resumes the run from the last checkpoint, even on another machine that sees the run directory",
        "at most 15 s after its start (the lease of the lost one ends)",
    ),
)


def page() -> str:
    return "\n".join(
        [
            "# Failures",
            "",
            "The class of a failure decides what happens, in one table (`rollbook/rollout/groups/failures.py`). This page is",
            "generated from it (`make docs`). An infrastructure failure is never a reward.",
            "",
            "## Actions",
            "",
            "| action | meaning |",
            "|---|---|",
            *(f"| {action} | {meaning} |" for action, meaning in MEANINGS.items()),
            "",
            "## The table",
            "",
            "The first row whose class matches applies.",
            "",
            "| error | action | reason |",
            "|---|---|---|",
            *(f"| `{row.error.__name__}` | {row.action} | {row.why} |" for row in FAILURES),
            "",
            "A process that dies (a signal, `os._exit`, out of memory) is a replaced worker.",
            "",
            "## Outcomes",
            "",
            "Reaching a limit is an outcome, not a failure: the episode keeps its reward and is trained.",
            "",
            "| end | when |",
            "|---|---|",
            *(f"| `{reason}` | {when} |" for reason, when in OUTCOMES.items()),
            "",
            "## The failure breaker",
            "",
            f"{MAX_CONSECUTIVE} failed groups in a row, or {MAX_SHARE:.0%} of the last {WINDOW}, stop the run with the most",
            f"frequent causes. {MAX_BARREN_DEATHS + 1} worker deaths without a finished group in between stop it",
            "with the last output.",
            "",
            "## Deadlines",
            "",
            "| operation | deadline | when it is exceeded |",
            "|---|---|---|",
            *(f"| {unit} | {setting} | {then} |" for unit, setting, then in DEADLINES),
            "",
            "Time in a queue, of the engine or of sandboxes, does not count as time of the episode.",
            "",
            "## Waits",
            "",
            "A process that waits in vain says so: on the console, in its line of the live view, in the run's page, in its log",
            "(event `process.waits`), and among the problems of the summary. A process that dies shows its last output on the",
            "console.",
            "",
            "| who waits, and for what | says so after | ends |",
            "|---|---|---|",
            *(f"| {wait} | {says} | {ends} |" for wait, says, ends in WAITS),
            "",
            "A restart does not hide a wait. A life of the trainer without a new step or a publication, or of a dispatcher that",
            f"the ledger does not know, is a failure, however long it was: {RULE.most_idle_lives + 1} in a row that waited "
            f"{RULE.idle_s:g} s or",
            "longer, or more than `run.most_quick_deaths` of any length, stop the run.",
            "",
            "## Faults of the machine",
            "",
            "One error, and no traceback. `rollbook train RUN_DIR` resumes.",
            "",
            "| fault | what happens |",
            "|---|---|",
            *(f"| {fault} | {then} |" for fault, then in MACHINE_FAULTS),
            "",
            "## Faults of several machines",
            "",
            "| fault | what happens | how soon |",
            "|---|---|---|",
            *(f"| {fault} | {then} | {soon} |" for fault, then, soon in CLUSTER_FAULTS),
            "",
            "## Measured",
            "",
            "A run with one kill every 30 s trains at least 0.88 of the steps of a run without kills on two dedicated cores, and",
            "0.80 on two cores with a load average of 11 to 19 (`make bench-ettr`, in `benchmarks/notes.md`). The times to heal",
            "of every fault and every process are in [results/chaos.md](results/chaos.md).",
            "",
        ]
    )


if __name__ == "__main__":
    sys.stdout.write(page())
