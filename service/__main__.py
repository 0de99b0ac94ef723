"""`python -m service serve ...`: the server's commands straight from a checkout."""

import sys

from service.commands.cli import main

sys.exit(main(sys.argv[1:]))
