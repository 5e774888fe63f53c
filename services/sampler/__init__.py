"""The sampler: generates with stale weights and pushes groups with their log-probs."""
