"""The calls of a client by who makes them: pullers of weights, the learner, sites that evaluate. Open `weights` first."""
