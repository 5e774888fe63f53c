"""What a store of this program has and one of schema 6 had not, taken away: for tests of stores of earlier programs."""

SINCE_6 = "DROP TABLE returners; ALTER TABLE work DROP COLUMN returned; ALTER TABLE work DROP COLUMN open_from;"
