"""Trace and largest eigenvalues of the Hessian of the loss."""
