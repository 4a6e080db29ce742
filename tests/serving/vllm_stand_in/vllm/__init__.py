"""Not vLLM: a stand-in with the classes, signatures and attributes of 0.33.0 that a probe sees.

It runs on a CPU, draws its verdicts at random, and writes down what it did (``truth``), so that a
recording can be compared with it. Only tests import it.
"""

__version__ = "0.33.0"
