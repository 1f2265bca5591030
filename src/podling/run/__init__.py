"""A run's folder and everything in it that must survive: lock, configuration, checkpoints, metrics, programs."""
