-- Where each payload is stored in the segment files, and the digest that detects damage.
CREATE TABLE payload_places (
    run_id   TEXT NOT NULL,
    group_id TEXT NOT NULL,
    segment  INTEGER NOT NULL,
    place    INTEGER NOT NULL,                      -- offset in the segment
    size     INTEGER NOT NULL,
    digest   INTEGER NOT NULL,                      -- 64 bits of XXH3, as a signed number
    PRIMARY KEY (run_id, group_id)
) WITHOUT ROWID;
CREATE INDEX payload_places_by_segment ON payload_places (segment, place);

-- How many bytes of a segment are certainly on the disk. Payloads behind that are compared with their digests when the store is opened.
CREATE TABLE segments (
    segment      INTEGER NOT NULL PRIMARY KEY,
    synced_bytes INTEGER NOT NULL
);
