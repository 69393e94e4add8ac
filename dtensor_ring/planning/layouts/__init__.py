"""How the tokens of a sequence are dealt to ranks."""
