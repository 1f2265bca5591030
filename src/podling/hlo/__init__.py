"""What the compiler made of a program: its optimised HLO text, read into instructions, loops and collectives."""
