"""Records of a study -> what they say: tables, figures and verdicts, each number with the runs behind it."""
