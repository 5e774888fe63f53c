"""Training engines behind one Protocol."""
