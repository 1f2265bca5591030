"""What a session on a chip buys, before it is spent: the step compiled for that chip, here."""
