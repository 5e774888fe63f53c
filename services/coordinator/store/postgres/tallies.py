"""What `store/tallies.py` counts, counted in PostgreSQL: by triggers as there, in tables that are never logged.

They are counted anew by each coordinator that takes the store; PostgreSQL empties them when it crashes, and the
coordinator ends with it. Rows are deleted and no table is dropped, so that nobody who only reads is waited for, as
pg_dump does for hours. Temporary tables would be nearer to SQLite's, but no trigger of a lasting table may name them
while two coordinators follow one another, and nobody vacuums them.
"""

from __future__ import annotations

from heterorl.coordinator.store.tallies import SOON

_COUNTS = f"""
CREATE UNLOGGED TABLE IF NOT EXISTS tally (name TEXT COLLATE "C" PRIMARY KEY, count BIGINT NOT NULL)
    WITH (fillfactor = 10);
CREATE UNLOGGED TABLE IF NOT EXISTS waiting (site TEXT COLLATE "C" PRIMARY KEY, num_groups BIGINT NOT NULL,
    num_bytes BIGINT NOT NULL) WITH (fillfactor = 50);
CREATE UNLOGGED TABLE IF NOT EXISTS out_work (
    assignment BIGINT PRIMARY KEY, site TEXT COLLATE "C" NOT NULL, incarnation TEXT COLLATE "C" NOT NULL,
    request_id TEXT COLLATE "C" NOT NULL, since DOUBLE PRECISION, is_away BIGINT NOT NULL DEFAULT 0);
CREATE INDEX IF NOT EXISTS out_by_holder ON out_work (site, incarnation, since);
CREATE INDEX IF NOT EXISTS out_by_request ON out_work (site, incarnation, request_id);
CREATE UNLOGGED TABLE IF NOT EXISTS holder (
    site TEXT COLLATE "C" NOT NULL, incarnation TEXT COLLATE "C" NOT NULL, held BIGINT NOT NULL,
    away BIGINT NOT NULL DEFAULT 0, due DOUBLE PRECISION NOT NULL DEFAULT {SOON},
    PRIMARY KEY (site, incarnation)) WITH (fillfactor = 50);
CREATE INDEX IF NOT EXISTS holder_due ON holder (due);
CREATE UNLOGGED TABLE IF NOT EXISTS sharer (
    site TEXT COLLATE "C" PRIMARY KEY, held BIGINT NOT NULL DEFAULT 0, counted BIGINT NOT NULL DEFAULT 0,
    asked DOUBLE PRECISION, owed BIGINT NOT NULL DEFAULT 0) WITH (fillfactor = 50);
CREATE INDEX IF NOT EXISTS sharer_asked ON sharer (asked) WHERE asked IS NOT NULL;
CREATE INDEX IF NOT EXISTS sharer_owed ON sharer (owed) WHERE owed > 0;
"""
_GROUPS = """
CREATE OR REPLACE FUNCTION tally_group() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    was boolean := TG_OP <> 'INSERT' AND OLD.state IN ('pending', 'leased');
    remains boolean := TG_OP <> 'DELETE' AND NEW.state IN ('pending', 'leased');
BEGIN
    IF was THEN
        UPDATE tally SET count = count - 1 WHERE name = OLD.state;
    END IF;
    IF remains THEN
        UPDATE tally SET count = count + 1 WHERE name = NEW.state;
    END IF;
    IF was AND NOT remains THEN
        UPDATE waiting SET num_groups = num_groups - 1, num_bytes = num_bytes - OLD.num_bytes WHERE site = OLD.site;
        DELETE FROM waiting WHERE site = OLD.site AND num_groups = 0;
    ELSIF remains AND NOT was THEN
        INSERT INTO waiting VALUES (NEW.site, 1, NEW.num_bytes) ON CONFLICT (site) DO UPDATE
            SET num_groups = waiting.num_groups + 1, num_bytes = waiting.num_bytes + excluded.num_bytes;
    END IF;
    IF TG_OP = 'INSERT' AND remains THEN
        -- A group that was taken wins back one of the assignments that its site left unanswered.
        UPDATE sharer SET owed = owed - 1 WHERE site = NEW.site AND owed > 0;
    END IF;
    RETURN NULL;
END $$;
CREATE OR REPLACE TRIGGER group_counts AFTER INSERT OR DELETE OR UPDATE OF state ON groups
    FOR EACH ROW EXECUTE FUNCTION tally_group();
"""
_WORK = """
CREATE OR REPLACE FUNCTION tally_work() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    IF TG_OP <> 'INSERT' AND OLD.is_leased = 1 THEN
        DELETE FROM out_work WHERE assignment = OLD.assignment;
    END IF;
    IF TG_OP <> 'DELETE' AND NEW.is_leased = 1 THEN
        INSERT INTO out_work (assignment, site, incarnation, request_id)
            VALUES (NEW.assignment, NEW.site, NEW.incarnation, NEW.request_id);
    END IF;
    RETURN NULL;
END $$;
CREATE OR REPLACE TRIGGER work_counts AFTER INSERT OR DELETE OR UPDATE OF is_leased, site, incarnation ON work
    FOR EACH ROW EXECUTE FUNCTION tally_work();
"""
_OUT = """
CREATE OR REPLACE FUNCTION tally_out() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    IF TG_OP = 'INSERT' THEN
        INSERT INTO holder (site, incarnation, held) VALUES (NEW.site, NEW.incarnation, 1)
            ON CONFLICT (site, incarnation) DO UPDATE SET held = holder.held + 1;
        INSERT INTO sharer (site) VALUES (NEW.site) ON CONFLICT DO NOTHING;
        UPDATE sharer SET held = held + 1, counted = counted + 1 WHERE site = NEW.site;
        UPDATE tally SET count = count + 1 WHERE name = 'out';
    ELSIF TG_OP = 'DELETE' THEN
        UPDATE holder SET held = held - 1, away = away - OLD.is_away
            WHERE site = OLD.site AND incarnation = OLD.incarnation;
        DELETE FROM holder WHERE site = OLD.site AND incarnation = OLD.incarnation AND held = 0;
        UPDATE sharer SET held = held - 1, counted = counted - 1 + OLD.is_away WHERE site = OLD.site;
        UPDATE tally SET count = count - 1 WHERE name = CASE OLD.is_away WHEN 0 THEN 'out' ELSE 'away' END;
    ELSIF OLD.is_away = 0 AND NEW.is_away = 1 THEN
        UPDATE sharer SET counted = counted - 1 WHERE site = NEW.site;
        UPDATE holder SET away = away + 1 WHERE site = NEW.site AND incarnation = NEW.incarnation;
        UPDATE tally SET count = count - 1 WHERE name = 'out';
        UPDATE tally SET count = count + 1 WHERE name = 'away';
    END IF;
    RETURN NULL;
END $$;
CREATE OR REPLACE TRIGGER out_counts AFTER INSERT OR DELETE OR UPDATE OF is_away ON out_work
    FOR EACH ROW EXECUTE FUNCTION tally_out();
CREATE OR REPLACE FUNCTION tally_wanting() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    UPDATE tally SET count = count + CASE WHEN NEW.counted > 0 OR NEW.asked IS NOT NULL THEN 1 ELSE -1 END
        WHERE name = 'wanting';
    RETURN NULL;
END $$;
CREATE OR REPLACE TRIGGER sharer_counts AFTER UPDATE OF counted, asked ON sharer FOR EACH ROW
    WHEN ((OLD.counted > 0 OR OLD.asked IS NOT NULL) <> (NEW.counted > 0 OR NEW.asked IS NOT NULL))
    EXECUTE FUNCTION tally_wanting();
"""
_FILL = """
INSERT INTO tally SELECT state, count(*) FROM groups WHERE state IN ('pending', 'leased') GROUP BY state
    ON CONFLICT (name) DO UPDATE SET count = excluded.count;
INSERT INTO waiting SELECT site, count(*), sum(num_bytes) FROM groups
    WHERE state IN ('pending', 'leased') GROUP BY site;
INSERT INTO out_work (assignment, site, incarnation, request_id)
    SELECT assignment, site, incarnation, request_id FROM work WHERE is_leased = 1;
"""
_NONE = """
ALTER TABLE out_work DISABLE TRIGGER out_counts;
DELETE FROM tally; DELETE FROM waiting; DELETE FROM out_work; DELETE FROM holder; DELETE FROM sharer;
ALTER TABLE out_work ENABLE TRIGGER out_counts;
INSERT INTO tally VALUES ('pending', 0), ('leased', 0), ('out', 0), ('away', 0), ('wanting', 0);
"""
TABLES = _COUNTS + _GROUPS + _WORK + _OUT
"""Of a store's schema; programs of schema 5 made them at each start."""
BEGIN = _NONE + _FILL
"""Counts what waits and what is out; once for each coordinator that takes the store."""
PAUSE = "ALTER TABLE groups DISABLE TRIGGER group_counts; ALTER TABLE work DISABLE TRIGGER work_counts;"
"""Stops counting, while rows are copied in by the thousand."""
RESUME = "ALTER TABLE groups ENABLE TRIGGER group_counts; ALTER TABLE work ENABLE TRIGGER work_counts;"
