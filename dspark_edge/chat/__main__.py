"""python -m dspark_edge.chat."""

import sys

from .app import main

sys.exit(main())
