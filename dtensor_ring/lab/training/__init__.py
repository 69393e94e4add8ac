"""What a training step of a language model would take on a machine."""
