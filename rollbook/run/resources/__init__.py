"""What a run needs and what its machine offers: automatic settings, the memory plan, the division of GPUs."""
