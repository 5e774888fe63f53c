"""Tokenizer, chat template, and tool calls of a run.

Open `prompter` first. Every node writes the same ids for the same messages. Drawn ids are never encoded again.
"""
