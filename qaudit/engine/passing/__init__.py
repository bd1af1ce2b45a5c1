"""One subject, once through its blocks, with every scheme side by side."""
