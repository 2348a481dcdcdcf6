"""Tests; the layout is that of src/ropaws."""

import os

# Two test processes share two cores; threads of one would only wait for the other. Read when the libraries
# are loaded, here and in the processes that tests start.
for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, "1")
