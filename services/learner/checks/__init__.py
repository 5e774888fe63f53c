"""What is believed of a group before it trains: reward, log-probs and draws computed again.

Open `examiner` first; `judge` decides what the numbers of a check mean.
"""
