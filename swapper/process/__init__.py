"""The process: what is done at its end, and Ctrl-C in the middle of something."""
