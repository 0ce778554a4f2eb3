"""What the simulator adds to the `perseus` command."""
