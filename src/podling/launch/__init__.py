"""Starting a run somewhere else than in this process."""
