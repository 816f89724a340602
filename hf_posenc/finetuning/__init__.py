"""Brief fine-tuning of a patched model: `transformers.Trainer` with a data stream, a loss and an output of our own."""
