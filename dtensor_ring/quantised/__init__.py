"""Keys and values in eight bits: formats, block scales and the transform before them."""
