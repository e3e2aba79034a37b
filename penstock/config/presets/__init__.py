"""Runs with a name. A preset is a function that returns a run; a variant edits another one."""
