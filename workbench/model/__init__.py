"""The Beam model as readable PyTorch: configuration, weights, cache, decoding, inspection."""
