"""Which keys travel, when, and on which way around the ring."""
