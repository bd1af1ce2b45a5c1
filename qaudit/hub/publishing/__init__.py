"""Publishing an audit: what is written into a model's repository, and carrying it out."""
