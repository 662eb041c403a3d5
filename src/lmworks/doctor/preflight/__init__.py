"""Before money is spent: checks of everything that a run will lean on."""
