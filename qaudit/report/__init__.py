"""Text and pictures, made of `types.Audit` alone, without torch."""
