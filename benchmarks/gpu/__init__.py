"""Trial of one card, in half an hour: `make gpu-trial`. Open `trial` first; each other module is a part of it."""
