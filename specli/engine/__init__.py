"""The only room that knows llama.cpp, and the shipped fake that behaves like it.

llama.cpp's threads wait for each other after every operation of a pass. GNU OpenMP lets them spin for milliseconds
there, and where another process wants the same CPU, each spin waits for a thread that is not running: on two cores,
two processes at once took 700 ms a token in place of 35. So they spin briefly before they sleep, as OpenMP itself
does once it knows of more threads than CPUs; alone that costs nothing that could be measured. OpenMP reads this when
it is loaded, so it is set here, before ``llama_cpp`` is imported; ``OMP_WAIT_POLICY`` and ``GOMP_SPINCOUNT`` of the
user stay as they are.
"""

import os

_SPINS = "1000"  # libgomp's own count for more threads than CPUs

if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", _SPINS)
