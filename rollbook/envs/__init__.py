"""WHERE THE AGENT ACTS: worlds."""
