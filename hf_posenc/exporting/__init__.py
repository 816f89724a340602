"""A patched model as a folder for others: plain Transformers, vLLM, or llama.cpp by way of its converter."""
