"""`python -m twinpool` is `twinpool`."""

import sys

from twinpool.cli import main

sys.exit(main())
