"""The numerics. Pure: tensors in, tensors or numbers out; no files, clock, logging or globals."""
