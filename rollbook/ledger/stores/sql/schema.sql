-- The ledger's tables. Columns follow the fields of rollbook/ledger/records.py. Written with SQLite's type names and in the subset of
-- SQL that SQLite and PostgreSQL share; postgres/schema.py translates the names that differ.

CREATE TABLE runs (
    run_id              TEXT PRIMARY KEY,
    settings            TEXT NOT NULL,              -- JSON
    created_at          REAL NOT NULL,
    next_sequence       INTEGER NOT NULL,
    next_arrival        INTEGER NOT NULL,
    next_publication    INTEGER NOT NULL,
    next_owner          INTEGER NOT NULL,
    next_member         INTEGER NOT NULL,
    opened_below        INTEGER NOT NULL,
    settled_below       INTEGER NOT NULL,
    exhausted           INTEGER NOT NULL,
    ended               TEXT,
    epoch               INTEGER NOT NULL,
    restored_step       INTEGER NOT NULL,
    epoch_acknowledged  INTEGER NOT NULL,
    decided_at_takeover INTEGER NOT NULL,
    last_decided        INTEGER NOT NULL,
    is_last_short       INTEGER NOT NULL,
    last_acknowledged   INTEGER NOT NULL,
    durable_step        INTEGER NOT NULL,
    payload_floor       INTEGER NOT NULL,
    version             INTEGER,
    publication         INTEGER,
    last_confirmed      INTEGER,
    num_opened          INTEGER NOT NULL,
    num_leased          INTEGER NOT NULL,
    num_waiting         INTEGER NOT NULL,
    num_queued          INTEGER NOT NULL,
    queued_bytes        INTEGER NOT NULL,
    num_batched         INTEGER NOT NULL,
    num_trained         INTEGER NOT NULL,
    num_durable         INTEGER NOT NULL,
    num_unusable        INTEGER NOT NULL,
    queued_samples      INTEGER NOT NULL,
    leased_samples      INTEGER NOT NULL,
    waiting_samples     INTEGER NOT NULL,
    external_queued     INTEGER NOT NULL,
    external_queued_samples INTEGER NOT NULL,
    expected_samples    INTEGER NOT NULL,
    stored_samples      INTEGER NOT NULL,
    next_action         INTEGER NOT NULL,
    is_paused           INTEGER NOT NULL,
    is_draining         INTEGER NOT NULL,
    is_drained          INTEGER NOT NULL,
    checkpoint_requested INTEGER,
    num_quarantined     INTEGER NOT NULL,
    checksum            INTEGER NOT NULL            -- of the other columns, also in the other tables
);

CREATE TABLE drops (
    run_id  TEXT NOT NULL,
    kind    TEXT NOT NULL,
    num     INTEGER NOT NULL,
    missing INTEGER NOT NULL,                       -- samples that these groups were opened for and never got
    PRIMARY KEY (run_id, kind)
) WITHOUT ROWID;

CREATE TABLE owners (
    run_id     TEXT NOT NULL,
    owner_id   TEXT NOT NULL,
    name       TEXT NOT NULL,
    nonce      TEXT NOT NULL,
    state      TEXT NOT NULL,
    last_seen  REAL NOT NULL,
    request_id TEXT,
    reply      BLOB,
    checksum   INTEGER NOT NULL,
    PRIMARY KEY (run_id, owner_id)
);
CREATE INDEX owners_by_name ON owners (run_id, name);
CREATE INDEX owners_alive ON owners (run_id) WHERE state = 'alive';

CREATE TABLE members (
    run_id      TEXT NOT NULL,
    member_id   TEXT NOT NULL,
    name        TEXT NOT NULL,
    role        TEXT NOT NULL,
    node        TEXT NOT NULL,
    address     TEXT NOT NULL,
    nonce       TEXT NOT NULL,
    state       TEXT NOT NULL,
    lease_s     REAL NOT NULL,
    joined_at   REAL NOT NULL,
    last_seen   REAL NOT NULL,
    in_service  INTEGER NOT NULL,
    publication INTEGER,
    load        REAL NOT NULL,
    checksum    INTEGER NOT NULL,
    PRIMARY KEY (run_id, member_id)
);
CREATE INDEX members_alive ON members (run_id) WHERE state = 'alive';

CREATE TABLE producers (
    run_id        TEXT NOT NULL,
    name          TEXT NOT NULL,
    weight        REAL NOT NULL,
    min_share     REAL NOT NULL,
    registered_at REAL NOT NULL,
    credit        REAL NOT NULL,
    num_batched   INTEGER NOT NULL,
    checksum      INTEGER NOT NULL,
    PRIMARY KEY (run_id, name)
);

CREATE TABLE groups (
    run_id                TEXT NOT NULL,
    group_id              TEXT NOT NULL,
    task_id               TEXT NOT NULL,
    draw                  INTEGER NOT NULL,
    position              INTEGER,
    origin                TEXT NOT NULL,
    state                 TEXT NOT NULL,
    sequence              INTEGER NOT NULL,
    opened_at             REAL NOT NULL,
    owner                 TEXT,
    lease_until           REAL,
    attempt               INTEGER NOT NULL,
    failures              INTEGER NOT NULL,
    admission_version     INTEGER,
    admission_publication INTEGER,
    arrival               INTEGER,
    publications          TEXT NOT NULL,            -- ids, separated by commas
    oldest_version        INTEGER,
    newest_version        INTEGER,
    step                  INTEGER,
    drop_reason           TEXT,
    unusable              TEXT,
    outcome               BLOB,                     -- JSON
    payload_digest        TEXT,
    payload_bytes         INTEGER NOT NULL,
    has_payload           INTEGER NOT NULL,
    release_step          INTEGER,
    producer              TEXT,
    num_samples           INTEGER NOT NULL,
    part                  INTEGER NOT NULL,
    expected_samples      INTEGER NOT NULL,
    baseline              TEXT,                     -- JSON
    earlier               BLOB,                     -- JSON
    checksum              INTEGER NOT NULL,
    PRIMARY KEY (run_id, group_id)
);
-- Partial indexes cover only open groups, so their cost does not grow with the length of the run. Each producer's queue has its own
-- range, so a long queue does not slow down another one.
CREATE UNIQUE INDEX groups_by_sequence ON groups (run_id, sequence, part);
CREATE INDEX groups_dispatched ON groups (run_id, sequence, part) WHERE state = 'dispatched';
CREATE INDEX groups_waiting ON groups (run_id, sequence) WHERE state = 'dispatched' AND owner IS NULL;
CREATE INDEX groups_dispatched_by_version ON groups (run_id, admission_version, expected_samples) WHERE state = 'dispatched';
CREATE INDEX groups_queued_by_sequence ON groups (run_id, origin, producer, sequence, part) WHERE state = 'queued';
CREATE INDEX groups_queued_by_arrival ON groups (run_id, origin, arrival) WHERE state = 'queued' AND producer IS NULL;
CREATE INDEX groups_queued_by_version ON groups (run_id, oldest_version)
    WHERE state = 'queued' AND oldest_version IS NOT NULL;
CREATE INDEX groups_queued_by_newest_version ON groups (run_id, newest_version)
    WHERE state = 'queued' AND newest_version IS NOT NULL;
CREATE INDEX groups_leases ON groups (run_id, lease_until) WHERE lease_until IS NOT NULL;
CREATE INDEX groups_owned ON groups (run_id, owner) WHERE owner IS NOT NULL;
CREATE INDEX groups_releasable ON groups (run_id, release_step) WHERE has_payload = 1 AND release_step IS NOT NULL;
CREATE INDEX groups_dropped_releasable ON groups (run_id, release_step)
    WHERE has_payload = 1 AND release_step IS NOT NULL AND state = 'dropped';
-- For listings by state. Durable groups need none: almost every settled group is durable, so a page is found in the order of sequence.
CREATE INDEX groups_batched ON groups (run_id, sequence, part) WHERE state = 'batched';
CREATE INDEX groups_trained ON groups (run_id, sequence, part) WHERE state = 'trained';
CREATE INDEX groups_dropped ON groups (run_id, sequence, part) WHERE state = 'dropped';

-- Used by stores that keep payloads in the database.
CREATE TABLE payloads (
    run_id   TEXT NOT NULL,
    group_id TEXT NOT NULL,
    body     BLOB NOT NULL,
    PRIMARY KEY (run_id, group_id)
);

CREATE TABLE positions (
    run_id     TEXT NOT NULL,
    position   INTEGER NOT NULL,
    unsettled  INTEGER NOT NULL,                    -- parts of its group that are dispatched or queued
    PRIMARY KEY (run_id, position)
) WITHOUT ROWID;

CREATE TABLE history (
    id         INTEGER PRIMARY KEY,
    run_id     TEXT NOT NULL,
    group_id   TEXT NOT NULL,
    at         REAL NOT NULL,
    from_state TEXT,
    to_state   TEXT NOT NULL,
    note       TEXT NOT NULL,
    by         TEXT NOT NULL,
    checksum   INTEGER NOT NULL
);
CREATE INDEX history_by_group ON history (run_id, group_id, id);

CREATE TABLE actions (
    run_id   TEXT NOT NULL,
    number   INTEGER NOT NULL,
    kind     TEXT NOT NULL,
    author   TEXT NOT NULL,
    at       REAL NOT NULL,
    target   TEXT NOT NULL,
    sample   INTEGER,
    note     TEXT NOT NULL,
    nonce    TEXT NOT NULL,
    checksum INTEGER NOT NULL,
    PRIMARY KEY (run_id, number),
    UNIQUE (run_id, nonce)
) WITHOUT ROWID;
CREATE INDEX actions_by_target ON actions (run_id, target, number);

CREATE TABLE batches (
    run_id     TEXT NOT NULL,
    step       INTEGER NOT NULL,
    digest     TEXT NOT NULL,
    is_last    INTEGER NOT NULL,
    cut        INTEGER,
    epoch      INTEGER NOT NULL,
    decided_at REAL NOT NULL,
    checksum   INTEGER NOT NULL,
    PRIMARY KEY (run_id, step)
);
CREATE TABLE batch_entries (
    run_id         TEXT NOT NULL,
    step           INTEGER NOT NULL,
    place          INTEGER NOT NULL,
    group_id       TEXT NOT NULL,
    sequence       INTEGER NOT NULL,
    payload_digest TEXT NOT NULL,
    oldest_version INTEGER,
    masked         TEXT NOT NULL,                   -- publication ids, separated by commas
    checksum       INTEGER NOT NULL,
    PRIMARY KEY (run_id, step, place),
    UNIQUE (run_id, group_id)                       -- a group is in one batch at most
) WITHOUT ROWID;

CREATE TABLE steps (
    run_id   TEXT NOT NULL,
    step     INTEGER NOT NULL,
    epoch    INTEGER NOT NULL,
    digest   TEXT NOT NULL,
    receipt  TEXT NOT NULL,
    at       REAL NOT NULL,
    split    TEXT,                                  -- JSON
    checksum INTEGER NOT NULL,
    PRIMARY KEY (run_id, step, epoch)
) WITHOUT ROWID;

CREATE TABLE publications (
    run_id         TEXT NOT NULL,
    id             INTEGER NOT NULL,
    epoch          INTEGER NOT NULL,
    step           INTEGER NOT NULL,
    digest         TEXT NOT NULL,
    effective_step INTEGER NOT NULL,
    registered_at  REAL NOT NULL,
    confirmed_at   REAL,
    checksum       INTEGER NOT NULL,
    PRIMARY KEY (run_id, id)
);
CREATE INDEX publications_by_effective_step ON publications (run_id, effective_step);
