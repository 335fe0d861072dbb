"""LEARNING: advantages, losses, step, checkpoints."""
