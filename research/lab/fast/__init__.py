"""The vectorised lab: many runs at once in one process, with stacked weights and the learner's own losses.

Open `batch` first: runs step by step. `layout` says where tokens stand, `forward` is the model, `generate` draws,
`losses` calls the learner's losses, `lags` says which version's rollouts a step trains on. No services take part: what
stays the same is the warm start, the prompts, the noise, the losses and the numbers that are kept.
"""
