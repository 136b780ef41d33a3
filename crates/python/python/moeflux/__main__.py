"""`python -m moeflux`: the command."""

from ._cli import main

main()
