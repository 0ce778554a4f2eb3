"""Better plans near the bound: the plans found so far, and the moves that improve them."""
