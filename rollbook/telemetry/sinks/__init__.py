"""External destinations of metrics. Each module is the only one that imports its library."""
