"""The training step, and the host loop that owns clock, signals and files around it."""
