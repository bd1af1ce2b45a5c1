"""The loss that each part of a model adds when it alone is quantized, and a mixture of bits."""
