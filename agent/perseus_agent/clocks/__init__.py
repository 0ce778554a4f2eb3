"""Where clocks are written: one thread for each GPU follows its ranks through their plans and sets the clock."""
