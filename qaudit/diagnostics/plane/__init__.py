"""The loss on a slice through a checkpoint: to its quantized self and the checkpoint before."""
