"""Text: documents, and the windows of tokens they are cut into."""
