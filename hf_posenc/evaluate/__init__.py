"""Perplexity by length (`perplexity`), passkey recall (`passkey`), encodings side by side on one model (`compare`)."""
