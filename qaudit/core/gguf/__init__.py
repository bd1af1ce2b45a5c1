"""The block formats of llama.cpp: how they are packed, decoded, and how scales are searched."""
