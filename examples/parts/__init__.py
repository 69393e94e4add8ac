"""What examples have in common: models, texts, comparisons. None of these is run by itself."""
