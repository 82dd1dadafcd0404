"""The only room that knows llama.cpp, and the shipped fake that behaves like it.

llama.cpp's threads wait for each other after every operation of a pass. GNU OpenMP lets them spin there for 3 ms by its
own estimate, and where another process wants the same CPU each spin waits for a thread that is not running: with the
default target on two cores, two processes at once took 700 ms a token. So they spin for 10 us before they sleep: 35 ms
then, and alone 11.0 ms in place of 11.15 (medians of eight runs each, in turn; more cores were not measured).

OpenMP reads this when it is loaded, so it is set here, in the environment of the whole process and its children,
before ``llama_cpp`` is imported. ``OMP_WAIT_POLICY`` and ``GOMP_SPINCOUNT`` of the user stay as they are.
"""

import os

_SPINS = "1000"  # libgomp reckons with 100,000 per millisecond, and with 100 to 1000 where threads outnumber CPUs

if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", _SPINS)
