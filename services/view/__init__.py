"""A page in the browser to read what the model says: samples of a running coordinator, or of an export.

Open `app` first: it joins a source (`live`, `export`), the index of its texts (`index`), and `pages` behind `server`.
"""
