"""A real vLLM server on this machine's CPU, serving ``beam-tiny`` (``make test-serving``)."""
