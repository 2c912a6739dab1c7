"""Methods that choose a form for every layer: each takes an inventory and returns a plan."""
