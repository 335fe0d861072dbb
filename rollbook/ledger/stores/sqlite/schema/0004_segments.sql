-- Payloads that lie in files beside an embedded store: where each begins, and how damage is recognised. Stores that keep payloads in
-- the database itself leave these tables empty.

CREATE TABLE payload_places (
    run_id   TEXT NOT NULL,
    group_id TEXT NOT NULL,
    segment  INTEGER NOT NULL,
    place    INTEGER NOT NULL,                      -- bytes before it in the segment
    size     INTEGER NOT NULL,
    digest   INTEGER NOT NULL,                      -- 64 bits of XXH3, as a signed number
    PRIMARY KEY (run_id, group_id)
) WITHOUT ROWID;
CREATE INDEX payload_places_by_segment ON payload_places (segment, place);

-- How far a segment is on the disk for certain. What lies behind is compared with its digest when the store is opened.
CREATE TABLE segments (
    segment      INTEGER NOT NULL PRIMARY KEY,
    synced_bytes INTEGER NOT NULL
);
