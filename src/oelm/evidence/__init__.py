"""What the numbers say, and nothing about how it looks."""
