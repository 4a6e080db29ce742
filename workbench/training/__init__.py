"""Corpus, pretraining of the tiny model, its evaluation: torch, numpy, tokenizers alone."""
