"""Models in other programs' files, both ways."""
