"""How what the numbers say looks: tables, figures, pages. Reads evidence only."""
