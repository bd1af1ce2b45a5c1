"""What a series of few points can tell: its course, where that breaks, what goes with it, what next."""
