"""What is counted of ServingPools: figures that the family gives, and the series that show them."""
