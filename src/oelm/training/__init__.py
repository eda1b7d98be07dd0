"""From a config to a trained model and its record."""
