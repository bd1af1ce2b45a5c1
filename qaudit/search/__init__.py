"""What measures more than was named: greedy soups."""
