"""The command line: one file for each verb. Start with `main`, which lists them and shows errors."""
