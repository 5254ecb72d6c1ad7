"""`python -m swapper` is the command `swapper`."""

from swapper.cli import main

main()
