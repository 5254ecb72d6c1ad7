"""The process: what is done at its end, Ctrl-C in the middle of something, and warnings that it logs once."""
