"""python -m dspark_edge.bench: what this machine does with a pair, measured."""
