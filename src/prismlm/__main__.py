"""``python -m prismlm`` is the ``prismlm`` command."""

from prismlm.cli.app import main

main()
