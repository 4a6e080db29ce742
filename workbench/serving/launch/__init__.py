"""A plan as the arguments of a vLLM server, checked, in every form in which they can be said."""
