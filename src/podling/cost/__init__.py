"""What a training step takes of a chip, in bytes and seconds: read from the compiled program, or estimated without."""
