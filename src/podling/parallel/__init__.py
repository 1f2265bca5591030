"""The hardware mesh, and the one table that says which array axis lies on which mesh axis."""
