"""Models: our GPT, and whatever Hugging Face can build."""
