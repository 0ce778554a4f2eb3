"""What takes time: reading inputs, solving, measuring, calibrating. Each outcome is an event of a part."""
