"""Presets: named functions that return a run; a variant edits another preset."""
