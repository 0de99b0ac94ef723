"""`python -m service serve ...`: runs the server's commands from a checkout."""

import sys

from service.commands.cli import main

sys.exit(main(sys.argv[1:]))
