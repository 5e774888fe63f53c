"""Experiments about losses under delay: the laboratory, its tests, its results and its pages.

Open `command`, the entry of `heterorl lab`, then `lab`. This folder is imported as `heterorl_research`:
`src/heterorl_research` is a link to it. It imports heterorl; heterorl never imports it.
"""
