"""WHERE GROUPS WAIT: the durable truth."""
