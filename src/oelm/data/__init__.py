"""Text to tensors: a corpus becomes token files once, token files become batches at every step."""
