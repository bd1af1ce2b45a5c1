"""Text -> tokens: which documents, how they are cut, which calibrate."""
