"""Errors by group of documents, where `strata` names a field of the evaluation text."""
