"""The tables of the store.

The column `variant` is empty for the trained weights. Rows of all variants share tables, and the view `stated` joins
their versions. Tables that variants share keep rowids: SQLite 3.40 reports false faults in a WITHOUT ROWID table whose
key is not its first columns.
"""

from __future__ import annotations

SCHEMA_VERSION = 15
ANOTHER_PROGRAM = (
    "go on with the release of heterorl that wrote it; or export the model with that release (`heterorl export`), and"
    " begin a run from it with this one"
)
"""The action for a store of another schema."""
AUDIT_TRIGGERS = """CREATE TRIGGER audit_keeps_rows BEFORE DELETE ON audit
    BEGIN SELECT RAISE(ABORT, 'the log of audit is only appended to'); END;
CREATE TRIGGER audit_keeps_content BEFORE UPDATE ON audit
    BEGIN SELECT RAISE(ABORT, 'the log of audit is only appended to'); END;
"""
SCHEMA = f"""
CREATE TABLE meta (key TEXT PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE ledger (account TEXT PRIMARY KEY, count INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE versions (
    version INTEGER PRIMARY KEY, step_id TEXT NOT NULL UNIQUE, content TEXT NOT NULL, epoch INTEGER NOT NULL,
    manifest BLOB NOT NULL, manifest_digest TEXT NOT NULL, state_root TEXT NOT NULL, published REAL NOT NULL,
    bytes_full INTEGER NOT NULL, bytes_last INTEGER NOT NULL, changed_fraction REAL NOT NULL,
    is_abandoned INTEGER NOT NULL DEFAULT 0);
CREATE INDEX versions_ages ON versions (version, is_abandoned, published);
CREATE TABLE steps (step INTEGER NOT NULL, version INTEGER NOT NULL, report BLOB NOT NULL,
    PRIMARY KEY (step, version)) WITHOUT ROWID;
CREATE TABLE sites (
    site TEXT NOT NULL, incarnation TEXT NOT NULL, engine TEXT NOT NULL, dtype TEXT NOT NULL,
    watermark INTEGER NOT NULL DEFAULT 0, accepted INTEGER NOT NULL DEFAULT 0, dropped INTEGER NOT NULL DEFAULT 0,
    variant TEXT NOT NULL DEFAULT '', max_delay_s REAL NOT NULL DEFAULT 0,
    work_ahead_s REAL NOT NULL DEFAULT 0, PRIMARY KEY (site, incarnation)) WITHOUT ROWID;
CREATE TABLE beyond_watermark (
    site TEXT NOT NULL, incarnation TEXT NOT NULL, sequence INTEGER NOT NULL,
    PRIMARY KEY (site, incarnation, sequence)) WITHOUT ROWID;
CREATE TABLE groups (
    arrival INTEGER PRIMARY KEY AUTOINCREMENT, site TEXT NOT NULL, incarnation TEXT NOT NULL,
    sequence INTEGER NOT NULL, digest TEXT NOT NULL, state TEXT NOT NULL, reason TEXT NOT NULL DEFAULT '',
    assignment INTEGER NOT NULL, oldest_version INTEGER NOT NULL, num_bytes INTEGER NOT NULL, arrived REAL NOT NULL,
    version INTEGER, payload BLOB, UNIQUE (site, incarnation, sequence));
CREATE INDEX groups_by_state ON groups (state, oldest_version, arrival);
CREATE INDEX groups_by_site ON groups (state, site, oldest_version, arrival, num_bytes) WHERE state = 'pending';
CREATE INDEX groups_refused ON groups (site, arrival) WHERE state = 'refused';
CREATE INDEX groups_by_version ON groups (version) WHERE version IS NOT NULL;
CREATE TABLE work (
    assignment INTEGER PRIMARY KEY, prompt_index INTEGER NOT NULL, seed INTEGER NOT NULL, site TEXT NOT NULL,
    incarnation TEXT NOT NULL, is_leased INTEGER NOT NULL, holders TEXT NOT NULL,
    request_id TEXT NOT NULL DEFAULT '', returned TEXT NOT NULL DEFAULT '{{}}', open_from INTEGER NOT NULL DEFAULT 0);
CREATE TABLE quarantines (site TEXT PRIMARY KEY, version INTEGER NOT NULL, reason TEXT NOT NULL);
CREATE TABLE retired (digest TEXT PRIMARY KEY) WITHOUT ROWID;
CREATE TABLE payloads (
    to_version INTEGER NOT NULL, kind TEXT NOT NULL, from_version INTEGER NOT NULL, digest TEXT NOT NULL,
    num_bytes INTEGER NOT NULL, variant TEXT NOT NULL DEFAULT '',
    PRIMARY KEY (variant, to_version, kind, from_version));
CREATE TABLE signatures (
    version INTEGER NOT NULL, signature BLOB NOT NULL, variant TEXT NOT NULL DEFAULT '',
    PRIMARY KEY (variant, version));
CREATE TABLE verified (
    version INTEGER NOT NULL, digest TEXT NOT NULL, variant TEXT NOT NULL DEFAULT '',
    PRIMARY KEY (variant, version));
CREATE TABLE canaries (
    version INTEGER NOT NULL, logprobs BLOB NOT NULL, variant TEXT NOT NULL DEFAULT '',
    PRIMARY KEY (variant, version));
CREATE TABLE variant_versions (
    variant TEXT NOT NULL, version INTEGER NOT NULL, manifest BLOB NOT NULL, manifest_digest TEXT NOT NULL,
    state_root TEXT NOT NULL, bytes_full INTEGER NOT NULL, changed_fraction REAL NOT NULL,
    PRIMARY KEY (variant, version));
CREATE INDEX variants_of_version ON variant_versions (version);
CREATE VIEW stated AS
    SELECT '' AS variant, version, manifest, manifest_digest, state_root, bytes_full, changed_fraction, is_abandoned
    FROM versions
    UNION ALL
    SELECT variant, version, f.manifest, f.manifest_digest, f.state_root, f.bytes_full, f.changed_fraction, is_abandoned
    FROM variant_versions f JOIN versions USING (version);
CREATE TABLE failures (site TEXT NOT NULL, accepted INTEGER NOT NULL, reason TEXT NOT NULL,
    detail TEXT NOT NULL);
CREATE INDEX failures_by_site ON failures (site);
CREATE TABLE convictions (site TEXT PRIMARY KEY, reason TEXT NOT NULL, at REAL NOT NULL) WITHOUT ROWID;
CREATE TABLE audit (sequence INTEGER PRIMARY KEY, at_us INTEGER NOT NULL, kind TEXT NOT NULL,
    subject TEXT NOT NULL, detail TEXT NOT NULL, previous TEXT NOT NULL, digest TEXT NOT NULL);
{AUDIT_TRIGGERS}
CREATE TABLE samples (
    id INTEGER PRIMARY KEY AUTOINCREMENT, kind TEXT NOT NULL, kept_because TEXT NOT NULL, detail TEXT NOT NULL,
    site TEXT NOT NULL, incarnation TEXT NOT NULL, sequence INTEGER NOT NULL, version INTEGER NOT NULL,
    oldest_version INTEGER NOT NULL, kept REAL NOT NULL, prompt_index INTEGER NOT NULL, num_rollouts INTEGER NOT NULL,
    num_truncated INTEGER NOT NULL, num_lost INTEGER NOT NULL DEFAULT 0, num_tokens INTEGER NOT NULL,
    reward_min REAL, reward_mean REAL, reward_max REAL, num_bytes INTEGER NOT NULL, has_texts INTEGER NOT NULL,
    prompt_preview TEXT NOT NULL, completion_preview TEXT NOT NULL);
CREATE INDEX samples_by_kind ON samples (kind, id);
CREATE INDEX samples_by_reason ON samples (kept_because, id);
CREATE INDEX samples_by_site ON samples (site, id);
CREATE INDEX samples_by_version ON samples (version, id);
CREATE INDEX samples_by_group ON samples (site, incarnation, sequence);
CREATE TABLE sample_payloads (id INTEGER PRIMARY KEY, content BLOB NOT NULL, note BLOB);
CREATE TABLE sample_totals (kind TEXT PRIMARY KEY, num_samples INTEGER NOT NULL, num_bytes INTEGER NOT NULL);
CREATE TABLE evaluation_jobs (
    job INTEGER PRIMARY KEY AUTOINCREMENT, version INTEGER NOT NULL, task_set TEXT NOT NULL, draws TEXT NOT NULL,
    state TEXT NOT NULL, planned REAL NOT NULL, wanted INTEGER NOT NULL DEFAULT 0,
    task_digest TEXT NOT NULL DEFAULT '', ended REAL NOT NULL DEFAULT 0, summary TEXT NOT NULL DEFAULT '',
    sites TEXT NOT NULL DEFAULT '[]', UNIQUE (version, task_set));
CREATE INDEX evaluation_jobs_by_state ON evaluation_jobs (state, task_set, version);
CREATE TABLE evaluation_results (
    job INTEGER NOT NULL, prompt_index INTEGER NOT NULL, site TEXT NOT NULL, scores TEXT NOT NULL,
    PRIMARY KEY (job, prompt_index)) WITHOUT ROWID;
CREATE TABLE evaluation_sets (task_set TEXT PRIMARY KEY, task_digest TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE prompts (
    prompt_index INTEGER PRIMARY KEY, mean REAL NOT NULL, num_groups INTEGER NOT NULL, band TEXT NOT NULL);
CREATE TABLE prompt_totals (name TEXT PRIMARY KEY, count INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE returners (site TEXT PRIMARY KEY, accepted INTEGER NOT NULL, num_returns INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE lost_shares (site TEXT PRIMARY KEY, share REAL NOT NULL) WITHOUT ROWID;
CREATE INDEX versions_abandoned ON versions (is_abandoned, version) WHERE is_abandoned = 1;
CREATE INDEX work_open ON work (assignment) WHERE is_leased = 0;
CREATE INDEX steps_by_version ON steps (version);
CREATE INDEX audit_by_subject ON audit (kind, subject);
"""
