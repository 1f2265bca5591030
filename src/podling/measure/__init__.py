"""How fast this machine is at what podling does: the step that training runs, the loader, generation."""
