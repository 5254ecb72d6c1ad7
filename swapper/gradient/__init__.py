"""The gradient swapper."""
