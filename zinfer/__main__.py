"""`python -m zinfer`."""

from zinfer.cli import main

main()
