"""How requests kept their limits, replica by replica."""
