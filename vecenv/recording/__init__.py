"""The flight recorder: an observer that records the requests to environments, writes files about failures, and replays them.

The recorder runs on the caller's side, where a crash of a worker cannot damage it. It copies the actions of a step when the
step is submitted, and its rewards and flags when the result is returned.
"""
