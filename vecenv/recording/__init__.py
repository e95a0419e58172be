"""The flight recorder: it records the requests to environments, writes files about failures, and replays these files.

The recorder runs in the caller's process, where a crash of a worker cannot damage its data. It copies the actions of a step
before the step is submitted, and the rewards and flags before the result is returned.
"""
