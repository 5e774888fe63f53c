"""What moves the weights once the gradient is there: the size of the step, and the optimizer that takes it.

Open `schedule` first; `optimizer` has AdamW and Adafactor.
"""
