"""At which clock the canary runs, so that there are windows at several."""
