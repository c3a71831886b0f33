"""The page and the figures of a run: what a run's folder holds, as charts and tables.

A chart is data (`charts`), drawn as SVG for the page and as PNG (`drawing`). `run_folder` reads
a run, `sections` makes the parts of its page, `page` writes one HTML file that loads nothing else,
and `report_at_end` does all of it when a run ends.
"""
