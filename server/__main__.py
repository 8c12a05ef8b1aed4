"""`python -m server` is `octavo`."""

import sys

from server.cli import main

sys.exit(main())
