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

CREATE TABLE groups (
    place    INTEGER PRIMARY KEY,   -- in the arrays: groups are numbered as they are indexed, nearly in order of admission
    group_id TEXT NOT NULL,
    facts    BLOB NOT NULL,         -- the columns of columns.py, packed
    body     BLOB NOT NULL          -- the whole row as MessagePack
);
