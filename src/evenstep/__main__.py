"""`python -m evenstep` is the `evenstep` command."""

from __future__ import annotations

import sys

from evenstep.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
