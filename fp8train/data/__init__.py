"""Text to training samples: source, tokenizer, packing, order."""
