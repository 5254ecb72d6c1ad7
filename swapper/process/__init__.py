"""What concerns the process and not a tensor: what is done at its end, and Ctrl-C in the middle of something."""
