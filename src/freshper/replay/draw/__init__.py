"""Which items: the index of draw weights, picks from it, and the sampling weights that correct them."""
