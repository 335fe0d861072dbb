"""Time, tasks and processes: how every room starts, waits, retries and stops."""
