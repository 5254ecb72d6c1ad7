"""The parameter swapper."""
