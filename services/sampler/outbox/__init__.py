"""Groups between generation and acknowledgement: durable, pushed in order, kept until an outcome is final.

Open `outbox` first, then `delivery`.
"""
