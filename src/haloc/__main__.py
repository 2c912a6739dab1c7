"""Lets ``python -m haloc`` stand for ``haloc``."""

from haloc.cli import main

main()
