"""The paper's Proposition 1, derived for the rule that really runs."""
