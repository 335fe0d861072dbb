"""Other people's trainers on our rollouts."""
