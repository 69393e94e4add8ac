"""What layers keep for backward: tiles of tokens, attention outputs, and host memory."""
