"""``make demo``: the whole system on this machine, and the page that it leaves behind."""
