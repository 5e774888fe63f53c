"""Getting a version: plan, fetch, apply to a staging copy, verify the whole state; nobody sees it half done.

A fetch resumes at every byte. Bytes are believed by their digests, a version by its signature, a state by its root.
Open `puller` first; `fallback` is the table of what follows a failure.
"""
