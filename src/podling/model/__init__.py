"""GPT-2 as one spec tree and pure functions of explicit parameters."""
