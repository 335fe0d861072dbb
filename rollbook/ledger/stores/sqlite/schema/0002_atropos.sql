-- The Atropos dialect: what its clients know beside the groups themselves. Names follow rollbook/ledger/atropos/records.py.

CREATE TABLE atropos_runs (
    run_id        TEXT PRIMARY KEY,
    registration  TEXT,                        -- JSON; NULL: no trainer has registered
    is_started    INTEGER NOT NULL,
    first_step    INTEGER NOT NULL,
    handed_step   INTEGER NOT NULL,
    served_step   INTEGER NOT NULL,
    shift         INTEGER NOT NULL,
    reset_below   INTEGER NOT NULL,
    latest        TEXT
);

CREATE TABLE atropos_envs (
    run_id               TEXT NOT NULL,
    env_id               INTEGER NOT NULL,
    desired_name         TEXT NOT NULL,
    real_name            TEXT NOT NULL,
    max_token_length     INTEGER NOT NULL,
    weight               REAL NOT NULL,
    group_size           INTEGER NOT NULL,
    min_batch_allocation REAL,
    is_connected         INTEGER NOT NULL,
    last_seen            REAL NOT NULL,
    PRIMARY KEY (run_id, env_id)
);

-- Queued groups by what batches are formed from: their environment (-1: none was named) and their number of sequences.
CREATE TABLE atropos_groups (
    run_id      TEXT NOT NULL,
    group_id    TEXT NOT NULL,
    place       INTEGER NOT NULL,
    env_id      INTEGER NOT NULL,
    size        INTEGER NOT NULL,
    is_buffered INTEGER NOT NULL,
    PRIMARY KEY (run_id, group_id)
);
CREATE INDEX atropos_groups_by_shelf ON atropos_groups (run_id, is_buffered, env_id, size, place);

CREATE TABLE atropos_shelves (
    run_id TEXT NOT NULL,
    env_id INTEGER NOT NULL,
    size   INTEGER NOT NULL,
    num    INTEGER NOT NULL,
    PRIMARY KEY (run_id, env_id, size)
);

-- Posts that are stored and whose answer may not have been read: the same body again is answered, not stored.
CREATE TABLE atropos_unanswered (
    run_id TEXT NOT NULL,
    digest TEXT NOT NULL,
    num    INTEGER NOT NULL,
    at     REAL NOT NULL,
    answer TEXT NOT NULL,                      -- JSON
    PRIMARY KEY (run_id, digest)
);
