"""How weights reach the replicas: one file a way."""
