"""``python -m powergrad`` is the command ``powergrad``."""

import sys

from powergrad_cli import main

sys.exit(main())
