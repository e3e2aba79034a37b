"""Words that everything else uses: errors, the legend of dimension letters, span names. Imports nothing of ours."""
