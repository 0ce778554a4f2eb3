"""What every PerseusJob has, whatever its family, and the protocol by which a family is known."""
