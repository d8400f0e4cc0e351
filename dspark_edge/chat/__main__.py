"""python -m dspark_edge.chat."""

import sys

from ..startup import end_on_ctrl_c
from . import main

end_on_ctrl_c()
code = main()
end_on_ctrl_c()
sys.exit(code)
