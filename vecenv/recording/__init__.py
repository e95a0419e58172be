"""The flight recorder: what environments were asked, written to a file when one fails, and asked again by ``vecenv replay``.

The recorder is on the caller's side, where a crash of a worker does it no harm. Actions, rewards and flags lie in shared
memory already, so that a step costs one copy of a few hundred bytes; everything else that a worker is asked is a message,
and the recorder keeps the message.
"""
