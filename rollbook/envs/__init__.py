"""Where the agent acts: environments, their server and their clients."""
