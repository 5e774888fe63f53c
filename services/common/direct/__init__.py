"""Payloads from addresses that a coordinator gives: which of them a node asks, and how it reads them. Open `reads`."""
