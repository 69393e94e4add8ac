"""What a layout or a strategy would cost, without running it."""
