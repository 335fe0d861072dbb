# rollbook ledger serve --port 8000
LEDGER=http://127.0.0.1:8000
TOKEN="Authorization: Bearer $(cat "${XDG_STATE_HOME:-$HOME/.local/state}/rollbook/token")"
get() { curl -sS --fail-with-body "$@"; echo; }                                   # --json sends and accepts JSON
field() { python3 -c 'import json, sys; print(json.load(sys.stdin)[sys.argv[1]])' "$1"; }

# The server, and a run with batches of one group that was sampled at most two versions earlier.
get $LEDGER/health
get $LEDGER/v1/openapi.json -o openapi.json
get -X PUT --json '{"settings": {"rule": {"groups_per_step": 1, "max_in_flight": 4, "max_head_offpolicy_versions": 2}}}' \
  -H "$TOKEN" $LEDGER/v1/runs/demo
get $LEDGER/v1/runs
get $LEDGER/v1/runs/demo/status

# The trainer takes its role and publishes its initial weights. Before that no group may start.
EPOCH=$(get --json '{"restored_step": 0}' -H "$TOKEN" $LEDGER/v1/runs/demo/take_role | field epoch)
get --json "{\"step\": 0, \"epoch\": $EPOCH, \"weights_digest\": \"w0\"}" -H "$TOKEN" $LEDGER/v1/runs/demo/register > publication.json
get --json "{\"epoch\": $EPOCH, \"publication\": $(cat publication.json)}" -H "$TOKEN" $LEDGER/v1/runs/demo/confirm
get "$LEDGER/v1/runs/demo/publications?from=0&limit=10"

# A dispatcher joins and opens three groups: three draws of its tasks.
OWNER=$(get --json '{"owner_name": "dispatcher", "nonce": "n1"}' -H "$TOKEN" $LEDGER/v1/runs/demo/join | field owner)
get --json "{\"owner\": \"$OWNER\", \"limit\": 3, \"wait_s\": 0, \"request_id\": \"r1\", \"draws\": [
  {\"task_id\": \"a\", \"number\": 0, \"position\": 0}, {\"task_id\": \"b\", \"number\": 0, \"position\": 1},
  {\"task_id\": \"c\", \"number\": 0, \"position\": 2}]}" $LEDGER/v1/runs/demo/open
get --json "{\"owner\": \"$OWNER\"}" $LEDGER/v1/runs/demo/heartbeat
get $LEDGER/v1/runs/demo/progress

# A group is submitted as one frame (base64 in JSON). `rollbook.LedgerClient` does this in Python.
python3 - > group.json <<'PYTHON'
import msgspec
from rollbook import PromptGroup, RolloutSample, encode_group

samples = tuple(
    RolloutSample([5, 6, 7], logprobs=[0, -0.5, -0.25], loss_mask=[0, 1, 1], versions=[-1, 0, 0], reward=reward)
    for reward in (0.0, 1.0)
)
group = encode_group(PromptGroup(id="a@0", task_id="a", draw=0, samples=samples))
print(msgspec.json.encode({"groups": [group]}).decode())
PYTHON
get --json @group.json $LEDGER/v1/runs/demo/submit
get --json @group.json $LEDGER/v1/runs/demo/submit                                # again: stored once
get --json '{"group_id": "b@0", "reason": "filtered"}' $LEDGER/v1/runs/demo/close
get --json '{"group_id": "c@0", "attempt": 1, "cause": "the worker died"}' $LEDGER/v1/runs/demo/release
get --json '{}' -H "$TOKEN" $LEDGER/v1/runs/demo/exhausted

# The trainer trains the first batch.
get --json "{\"step\": 1, \"epoch\": $EPOCH, \"wait_s\": 5}" -H "$TOKEN" $LEDGER/v1/runs/demo/batch -o batch.bin
get --json "{\"step\": 1, \"epoch\": $EPOCH, \"weights_digest\": \"w1\"}" -H "$TOKEN" $LEDGER/v1/runs/demo/acknowledge
get --json "{\"step\": 1, \"epoch\": $EPOCH, \"oldest_kept\": 1}" -H "$TOKEN" $LEDGER/v1/runs/demo/checkpointed

# What happened.
get "$LEDGER/v1/runs/demo/groups?state=durable&limit=10"
get $LEDGER/v1/runs/demo/groups/a@0
get $LEDGER/v1/runs/demo/groups/a@0/payload -o a.msgpack
get $LEDGER/v1/runs/demo/batches/1
get "$LEDGER/v1/runs/demo/steps?from=1"
get "$LEDGER/v1/runs/demo/outcomes?from=0"
get "$LEDGER/v1/runs/demo/changes?after=0"
get $LEDGER/v1/runs/demo/audit
get $LEDGER/metrics
timeout 1 curl -sS -N $LEDGER/v1/runs/demo/events || true                            # until the connection is closed

# Producers that play their own tasks, and processes that join a run.
get -X PUT --json '{"name": "notes", "weight": 2.0, "min_share": 0.25}' $LEDGER/v1/runs/demo/producers
get $LEDGER/v1/runs/demo/producers
get --json '{"name": "gpu-1", "role": "policy", "node": "host-1", "nonce": "m1"}' -H "$TOKEN" $LEDGER/v1/runs/demo/members
get --json '{"member": "policy#0", "publication": 0, "load": 3}' -H "$TOKEN" $LEDGER/v1/runs/demo/members/heartbeat
get $LEDGER/v1/runs/demo/members
get -X PUT --json '{"announcement": {"directory_id": "d1", "version": "0.1.0", "config": "", "addresses": {}, "tokens": {}}}' \
  -H "$TOKEN" $LEDGER/v1/runs/demo/announcement
get -H "$TOKEN" $LEDGER/v1/announced
get -H "$TOKEN" $LEDGER/v1/runs/demo/announcement
get --json '{"file": "logs/gpu-1.jsonl", "data": "e30K", "stream": "m1", "start": 0}' -H "$TOKEN" $LEDGER/v1/runs/demo/telemetry
get --json '{}' -H "$TOKEN" $LEDGER/v1/runs/demo/telemetry/collect                    # for the supervisor of the run
get --json '{"member": "policy#0"}' -H "$TOKEN" $LEDGER/v1/runs/demo/members/leave

# What operators do. Each action is recorded with its author and time.
get --json '{"kind": "pause", "author": "Ada", "note": "the reward is wrong", "nonce": "a1"}' -H "$TOKEN" $LEDGER/v1/runs/demo/actions
get --json '{"kind": "resume", "author": "Ada", "nonce": "a2"}' -H "$TOKEN" $LEDGER/v1/runs/demo/actions
get --json '{"kind": "quarantine", "author": "Ada", "target": "c", "nonce": "a3"}' -H "$TOKEN" $LEDGER/v1/runs/demo/actions
get $LEDGER/v1/runs/demo/actions

get --json "{\"epoch\": $EPOCH, \"reason\": \"max_steps\"}" -H "$TOKEN" $LEDGER/v1/runs/demo/finish
