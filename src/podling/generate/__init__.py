"""Text out of a model: sampling, cached decoding, streaming."""
