"""Speculative decoding: the DFlash2 drafter, verification, the decode loop, and its figures."""
