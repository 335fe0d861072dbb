"""Child processes: one implementation of start, messages, heartbeat and end, used by every room.

`process` is the parent's side, `child` the child's side, `frames` the messages between them.
"""
