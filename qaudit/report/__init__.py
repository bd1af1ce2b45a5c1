"""Text and pictures, made of `types.AuditRecord` alone, without torch."""
