"""The page about failures, written from the table itself: `python -m rollbook.rollout.dispatch.failure_reference`."""

import sys

from rollbook.rollout.dispatch.failure_breaker import MOST_CONSECUTIVE, MOST_SHARE, WINDOW
from rollbook.rollout.groups.failures import FAILURES, OUTCOMES, Action
from rollbook.rollout.workers.pool import MAX_BARREN_DEATHS

MEANINGS = {
    Action.DROP_SAMPLE: "the sample stays in its group as unscorable, or is missing from it; it is not played again, has no "
    "advantage, and is counted",
    Action.RETRY_SAMPLE: "it is played again while the group's `rollout.retry_budget` and its lease last; then it is dropped",
    Action.FAIL_GROUP: "the group is stored as dropped(invalid) with its causes, and the circuit breaker counts it",
    Action.REPLACE_WORKER: "the process is replaced, and its groups get another attempt from the ledger, `gate.max_attempts` "
    "in all",
    Action.STOP_RUN: "the run stops with exit code 1 and says what a person must do",
}

DEADLINES: tuple[tuple[str, str, str], ...] = (
    ("a group", "`gate.group_deadline_s`", "given back; the stacks of its episodes are in `rollout.group_stalled`"),
    (
        "an episode",
        "`rollout.max_seconds` of its own, and `rollout.grace_s`",
        "ended as truncated; cancelled where the function does not look at its time",
    ),
    ("a policy request", "`inference.request_s`, retries included", "retried sample"),
    ("a reset or step of a world", "`rollout.step_s`", "retried sample"),
    ("waiting for a world", "`rollout.open_s`", "retried sample"),
    ("a reward function", "`rollout.rewards.timeout_s`", "its process is killed and replaced; dropped sample"),
    ("loading reward functions", "`rollout.rewards.start_s`", "stopped run"),
    ("a worker's first word", "`rollout.worker_start_s`", "replaced worker"),
    ("a worker's heartbeat", "`rollout.worker_silence_s`", "its stack is written down; replaced worker"),
    ("a worker's stop", "`rollout.worker_stop_s`", "asked, terminated, killed"),
    ("a call to the ledger", "`ledger.request_s`, retries included", "the process that asked is started again"),
    ("a push of weights", "`trainer.publish_timeout_s`", "the trainer is started again"),
    ("a process's heartbeat", "`run.silence_s`", "its stack is written down; it is killed and started again"),
    ("a process's first word", "`run.ready_s`", "stopped run"),
)


def page() -> str:
    return "\n".join(
        [
            "# Failures",
            "",
            "What becomes of a failure is decided by its class, in one table (`rollbook/rollout/groups/failures.py`); this page is",
            "written from it (`make docs`). An infrastructure failure is never a reward.",
            "",
            "## Who acts",
            "",
            "| what happens | meaning |",
            "|---|---|",
            *(f"| {action} | {meaning} |" for action, meaning in MEANINGS.items()),
            "",
            "## The table",
            "",
            "The first row whose class fits decides.",
            "",
            "| error | what happens | why |",
            "|---|---|---|",
            *(f"| `{row.error.__name__}` | {row.action} | {row.why} |" for row in FAILURES),
            "",
            "A process that dies by itself (a signal, `os._exit`, out of memory) is a replaced worker.",
            "",
            "## Outcomes",
            "",
            "Reaching a limit is something the policy did: the episode ends with what it earned, and is trained.",
            "",
            "| end | when |",
            "|---|---|",
            *(f"| `{reason}` | {when} |" for reason, when in OUTCOMES.items()),
            "",
            "## The circuit breaker",
            "",
            f"{MOST_CONSECUTIVE} groups in a row that failed, or {MOST_SHARE:.0%} of the last {WINDOW}, stop the run with the",
            f"commonest causes. {MAX_BARREN_DEATHS + 1} deaths of workers without a finished group in between stop it with",
            "their last words.",
            "",
            "## Every wait has an end",
            "",
            "| unit in flight | its deadline | then |",
            "|---|---|---|",
            *(f"| {unit} | {setting} | {then} |" for unit, setting, then in DEADLINES),
            "",
            "Waiting for a place in a queue, of the engine or of sandboxes, is not the episode's time.",
            "",
        ]
    )


if __name__ == "__main__":
    sys.stdout.write(page())
