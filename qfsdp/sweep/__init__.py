"""Many configs side by side: what each takes, how fast it is, what it costs.

`cells` makes the cells of a sweep from a grid, `estimate_cell` and `measure_cell` fill one in,
`results` keeps them. `prices` adds costs, `published` figures of others, and `output` writes the
table, the figures and the page.
"""
