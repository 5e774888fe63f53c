"""The calls of a client by who makes them: pullers, the learner, sites that evaluate. Open `weights` first."""
