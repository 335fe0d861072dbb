"""PLAYING EPISODES: contract, assemblers, groups, workers, dispatcher."""
