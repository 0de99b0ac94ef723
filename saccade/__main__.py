"""`python -m saccade` is the `saccade` command."""

import sys

from saccade.cli import main

sys.exit(main())
