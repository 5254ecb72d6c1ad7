"""Formats of others: torch's ZIP files, distributed checkpoints, safetensors."""
