"""Our checkpoints: directories of linked records."""
