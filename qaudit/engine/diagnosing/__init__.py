"""Why it breaks: what is asked of a subject beside its losses, while its weights are there."""
