"""Models that read images beside text."""
