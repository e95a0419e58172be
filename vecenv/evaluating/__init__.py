"""A list of episodes, each run exactly once, by a policy, on any engine: :func:`vecenv.evaluate`."""
