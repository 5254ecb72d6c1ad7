"""swapper."""
