"""Read by Python at its start where this folder is in PYTHONPATH: the process runs without the garbage collector.

It lives for seconds, and to look at the objects of torch and transformers, at its end too, takes 3 CPU seconds.
"""

import atexit
import gc

gc.disable()
atexit.register(gc.freeze)
