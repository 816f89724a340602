"""Generators of evaluation documents: built to size with any tokenizer, seeded, nothing downloaded."""
