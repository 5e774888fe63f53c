"""The learner: streams whole groups, runs optimizer steps, publishes versions."""
