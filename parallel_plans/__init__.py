"""Plans that make existing models context-parallel; each needs its own optional package."""
