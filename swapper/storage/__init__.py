"""Records on drives, and the pool of page-locked buffers over them."""
