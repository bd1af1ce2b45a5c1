"""What a series of few points can tell: where its course breaks, what goes with it, what next."""
