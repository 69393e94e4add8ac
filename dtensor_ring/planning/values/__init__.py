"""Small values that plans are made of: counts, ranges, spans, arrays that can be keys, a cache."""
