"""What measures more than was named: greedy soups, and releases beside their ingredients."""
