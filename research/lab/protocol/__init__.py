"""What makes an experiment convincing: rules it keeps, learning rates chosen for every arm, a curve that is flat.

Open `rules` first; `race` chooses rates. Pure, but for the file of chosen learning rates in `rates`.
"""
