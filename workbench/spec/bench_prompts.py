"""Beginnings of Python files to measure decoding on: written for this, so in no training corpus."""

PROMPTS = (
    '''"""A ledger of borrowed tools."""

from dataclasses import dataclass
from datetime import date


@dataclass
class Loan:
    """One tool that somebody took home."""

    tool: str
    borrower: str
    since: date
    returned: bool = False

    def days(self, today):''',
    '''import argparse
import sys
from pathlib import Path


def count_lines(path, encoding="utf-8"):
    """Return the number of lines that are not blank."""
    with open(path, encoding=encoding) as stream:
        return sum(1 for line in stream if line.strip())


def main(argv=None):
    parser = argparse.ArgumentParser(description="Count lines of files.")''',
    '''class Tree:
    """A binary search tree of comparable keys."""

    def __init__(self):
        self.root = None
        self.size = 0

    def insert(self, key, value):
        """Add a key, or replace the value of one that is there."""''',
    '''import json
import logging
import os

logger = logging.getLogger(__name__)


class Settings:
    """Settings of a program, read from a JSON file and from the environment."""

    def __init__(self, path=None, prefix="APP_"):
        self.path = path
        self.prefix = prefix
        self.values = {}

    def load(self):''',
    """import unittest

from inventory import Shelf, ShelfError


class ShelfTest(unittest.TestCase):
    def setUp(self):
        self.shelf = Shelf(width=3)

    def test_empty_shelf_has_no_items(self):
        self.assertEqual(len(self.shelf), 0)

    def test_put_adds_an_item(self):""",
    '''import numpy as np


def moving_average(values, window):
    """Mean of each run of ``window`` neighbouring values.

    Parameters
    ----------
    values : array_like
        Numbers in the order they were measured.
    window : int
        How many neighbours are averaged.

    Returns
    -------''',
    '''import asyncio
import time


class RateLimiter:
    """Lets at most ``limit`` calls through in ``period`` seconds."""

    def __init__(self, limit, period=1.0):
        if limit <= 0:
            raise ValueError("limit must be positive")
        self.limit = limit
        self.period = period
        self._calls = []

    async def acquire(self):''',
    '''def parse_header(line):
    """Split a line such as ``Name: value`` into a name and a value.

    >>> parse_header("Content-Type: text/plain")
    ('content-type', 'text/plain')
    """
    name, separator, value = line.partition(":")
    if not separator:
        raise ValueError("not a header: %r" % line)''',
)
