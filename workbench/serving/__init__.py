"""Beside a serving engine: what it says about itself, read and compared with what was predicted."""
