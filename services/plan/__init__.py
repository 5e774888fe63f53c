"""A run on paper: seconds, memory and bytes of a learner before anybody rents it. Pure: numbers in, numbers out.

Open `plan` first; `shape` counts parameters, `memory` bytes of a rank, `duration` seconds, `traffic` bytes on the WAN,
`assumptions` says what is taken for granted, and where each number is from.
"""
