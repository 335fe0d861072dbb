"""WHERE THE AGENT ACTS: environments, and the ways to reach them."""
