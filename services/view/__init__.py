"""A browser page that shows samples: of a running coordinator, or of an export file.

Open `pages` first: `served` joins a source (`live_source`, `export_source`), the index of its texts (`sample_index`),
the HTML pages and the HTTP server (`view_server`).
"""
