"""`heterorl view`: a browser page of samples, from coordinator or file.

Open `pages` first: `served` joins a source (`live_source`, `export_source`), the index of its texts (`sample_index`),
the HTML pages and the HTTP server (`view_server`).
"""
