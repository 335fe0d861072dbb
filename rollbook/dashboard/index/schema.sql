-- The view index of one run. It is derived from the ledger: if it is deleted, it is built again.

CREATE TABLE meta (
    name  TEXT PRIMARY KEY,
    value TEXT NOT NULL
) WITHOUT ROWID;

CREATE TABLE tasks (
    number  INTEGER PRIMARY KEY,
    task_id TEXT NOT NULL
);

CREATE TABLE producers (
    number INTEGER PRIMARY KEY,
    name   TEXT NOT NULL
);

-- Columns are those of `columns.py`: codes instead of texts, -1 or NULL where nothing is known.
CREATE TABLE groups (
    place    INTEGER PRIMARY KEY,   -- in the arrays: groups are numbered as they are indexed, nearly in order of admission
    group_id TEXT NOT NULL UNIQUE,
    state    INTEGER NOT NULL,
    drop_kind INTEGER NOT NULL,
    origin   INTEGER NOT NULL,
    ends     INTEGER NOT NULL,
    task     INTEGER NOT NULL,
    producer INTEGER NOT NULL,
    samples  INTEGER NOT NULL,
    step     INTEGER NOT NULL,
    lag      INTEGER NOT NULL,
    reward   REAL,
    solved   REAL,
    tokens   REAL,
    turns    REAL,
    seconds  REAL,
    body     BLOB NOT NULL      -- the whole row as MessagePack
);
