"""`python -m locojax`: the same as the `locojax` command."""

import sys

from locojax.cli import main

sys.exit(main())
