"""`heterorl evaluate` and `heterorl export`: what a model scores, and a trained one as files.

One file a command. Open `export` first.
"""
