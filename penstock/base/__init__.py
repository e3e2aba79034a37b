"""Words that everything else uses: errors, units, the legend of dimension letters, span names, log. Imports nothing of ours."""
