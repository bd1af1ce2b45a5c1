"""Executors have the units of a plan measured: here, in processes of this machine, in a queue."""
