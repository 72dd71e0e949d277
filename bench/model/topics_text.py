#!/usr/bin/env python3
"""Prints the topics of Python's help(), blank lines between them: some 500 KB of English with code in it that every
Python carries, to measure perplexity on. Another version of Python may have another text."""
import sys
from pydoc_data.topics import topics

sys.stdout.reconfigure(encoding="utf-8")
print("\n\n".join(topics[name].strip("\n") for name in sorted(topics)))
