"""The optimizer swapper."""
