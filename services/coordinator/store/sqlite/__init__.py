"""SQLite as the store: one file beside the payloads, for a coordinator that has its own disk. Open `engine` first."""
