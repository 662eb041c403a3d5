"""`lmworks bundle`: one archive of a run for a bug report or a colleague, without texts, secrets or names."""
