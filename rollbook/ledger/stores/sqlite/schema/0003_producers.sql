-- Producers outside the gate: their part of a batch, and the bytes that wait in the queue.

CREATE TABLE producers (
    run_id        TEXT NOT NULL,
    name          TEXT NOT NULL,
    weight        REAL NOT NULL,
    min_share     REAL NOT NULL,
    registered_at REAL NOT NULL,
    credit        REAL NOT NULL,
    num_batched   INTEGER NOT NULL,
    PRIMARY KEY (run_id, name)
);

ALTER TABLE groups ADD COLUMN producer TEXT;
ALTER TABLE runs ADD COLUMN queued_bytes INTEGER NOT NULL DEFAULT 0;
UPDATE runs SET queued_bytes = (
    SELECT coalesce(sum(payload_bytes), 0) FROM groups WHERE groups.run_id = runs.run_id AND state = 'queued'
);

-- The queue of each producer apart, and apart from what nobody registered for: a long one never slows down another.
DROP INDEX groups_queued_by_sequence;
DROP INDEX groups_queued_by_arrival;
CREATE INDEX groups_queued_by_sequence ON groups (run_id, producer, sequence) WHERE state = 'queued';
CREATE INDEX groups_queued_by_arrival ON groups (run_id, arrival) WHERE state = 'queued' AND producer IS NULL;
