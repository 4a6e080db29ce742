"""A vLLM server of this machine: started, followed, found again, ended."""
